"""A picture seen in one mode is found in the worker's prefix cache by the other.

The identity that we send with tensors is the one that vLLM computes itself for
a file that it takes as it is, so the cached blocks have one key.
"""

from __future__ import annotations

import pytest

from router.wire import engine
from tests.real.asking import IMAGE, IMAGES, ask, data_url, flush, prompt, ref, request
from tests.real.conftest import router_for
from tests.real.media_host import MediaHost
from tests.real.stack import Stack, Worker

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

# vLLM's on a CPU.
BLOCK = 128
BOTH_WAYS = pytest.mark.parametrize(
    ("first", "second"),
    [(engine.ROUTER, engine.WORKER), (engine.WORKER, engine.ROUTER)],
    ids=["router-worker", "worker-router"],
)


def full_blocks(prompt_tokens: int) -> int:
    """The most tokens of a prompt that vLLM takes from its cache: all but the last is enough."""
    return (prompt_tokens - 1) // BLOCK * BLOCK


@BOTH_WAYS
@pytest.mark.parametrize("picture", ["photo_640x480.jpg", "photo_1008x1344.webp"])
async def test_the_other_mode_hits_the_cache(
    stack: Stack,
    refs_worker: Worker,
    picture: str,
    first: engine.MmProcessing,
    second: engine.MmProcessing,
) -> None:
    router = router_for(stack, refs_worker)
    await flush(refs_worker.address)
    ids = prompt(IMAGE, "What is in the picture?")
    cold = await ask(router.address, request(ids, ref(data_url(picture)), mode=first))
    warm = await ask(router.address, request(ids, ref(data_url(picture)), mode=second))
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == full_blocks(warm.prompt_tokens) >= 2 * BLOCK
    assert warm.ids == cold.ids


async def test_by_whatever_way_the_picture_came(
    stack: Stack, refs_worker: Worker, media_host: MediaHost
) -> None:
    router = router_for(stack, refs_worker)
    await flush(refs_worker.address)
    ids, name = prompt(IMAGE, "What is in the picture?"), "photo_640x480.jpg"
    await ask(refs_worker.address, request(ids, ref(media_host.url(name))))
    for source in (data_url(name), media_host.url(name), (IMAGES / name).read_bytes()):
        answer = await ask(router.address, request(ids, ref(source), mode=engine.ROUTER))
        assert answer.cached_tokens == full_blocks(answer.prompt_tokens)


async def test_another_picture_of_the_same_size_does_not_hit(
    stack: Stack, refs_worker: Worker
) -> None:
    router = router_for(stack, refs_worker)
    await flush(refs_worker.address)
    ids = prompt(IMAGE, "What is in the picture?")
    for picture in ("grey_203x151.jpg", "progressive_203x151.jpg", "icc_203x151.jpg"):
        answer = await ask(router.address, request(ids, ref(data_url(picture)), mode=engine.ROUTER))
        assert answer.cached_tokens == 0


@pytest.mark.parametrize(
    "picture", ["rgba_203x151.png", "palette_trns_203x151.png", "grey_203x151.jpg"]
)
async def test_a_converted_picture_is_not_shared_but_right(
    stack: Stack, refs_worker: Worker, picture: str
) -> None:
    """vLLM hashes what a conversion made of such a file, pixels and all; we hash the file.

    So neither finds the other's blocks, and both compute the same answer. Within
    one mode the picture is found.
    """
    router = router_for(stack, refs_worker)
    await flush(refs_worker.address)
    ids = prompt(IMAGE, "Enough text for some blocks that begin with the picture. " * 20)
    answers = [
        await ask(router.address, request(ids, ref(data_url(picture)), mode=mode))
        for mode in (engine.WORKER, engine.ROUTER, engine.WORKER, engine.ROUTER)
    ]
    cold, other, again, other_again = answers
    assert cold.cached_tokens == other.cached_tokens == 0
    assert again.cached_tokens == other_again.cached_tokens == full_blocks(cold.prompt_tokens)
    assert cold.ids == other.ids == again.ids == other_again.ids


async def test_a_hint_that_changes_pixels_changes_the_identity(
    stack: Stack, refs_worker: Worker
) -> None:
    router = router_for(stack, refs_worker)
    await flush(refs_worker.address)
    ids = prompt("A text of some length before it. " * 24, IMAGE, "What is in the picture?")
    whole = await ask(router.address, request(ids, ref(data_url("photo_640x480.jpg"))))
    smaller = ref(data_url("photo_640x480.jpg"))
    smaller.hints.max_long_side_pixels = 639
    answer = await ask(router.address, request(ids, smaller))
    # The text before the picture is shared, the picture is not.
    assert 0 < answer.cached_tokens < full_blocks(whole.prompt_tokens) - BLOCK
