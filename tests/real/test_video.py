"""Videos, alone and beside pictures: the same answer wherever they are processed."""

from __future__ import annotations

import base64

import pytest

from router.wire import common, engine
from tests.real.asking import (
    IMAGE,
    VIDEO,
    VIDEOS,
    Answer,
    ask,
    data_url,
    flush,
    prompt,
    ref,
    request,
)
from tests.real.conftest import router_for
from tests.real.media_host import MediaHost
from tests.real.stack import Stack, Worker
from tests.real.test_modes import fresh, same

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

CLIP = "clip_320x240.mp4"
MODES = pytest.mark.parametrize("mode", [engine.ROUTER, engine.WORKER], ids=["router", "worker"])


def clip_url() -> str:
    return "data:video/mp4;base64," + base64.b64encode((VIDEOS / CLIP).read_bytes()).decode()


def clip(source: str | bytes) -> engine.MediaRef:
    return ref(source, common.VIDEO)


@MODES
async def test_a_video_means_the_same_wherever_it_is_processed(
    stack: Stack, refs_worker: Worker, mode: engine.MmProcessing
) -> None:
    router = router_for(stack, refs_worker)
    ids = prompt(VIDEO, "What happens?")
    direct = await fresh(refs_worker, refs_worker.address, request(ids, clip(clip_url())))
    through = await fresh(refs_worker, router.address, request(ids, clip(clip_url()), mode=mode))
    same(direct, through)


async def test_by_whatever_way_it_comes(
    stack: Stack, refs_worker: Worker, media_host: MediaHost
) -> None:
    router = router_for(stack, refs_worker)
    ids = prompt(VIDEO, "What happens?")
    answers: list[Answer] = []
    for source in (clip_url(), media_host.url(CLIP), (VIDEOS / CLIP).read_bytes()):
        asked = request(ids, clip(source), mode=engine.ROUTER)
        answers.append(await fresh(refs_worker, router.address, asked))
    same(answers[0], answers[1])
    same(answers[0], answers[2])


@MODES
@pytest.mark.parametrize("video_first", [True, False], ids=["video-image", "image-video"])
async def test_a_video_beside_a_picture(
    stack: Stack, refs_worker: Worker, mode: engine.MmProcessing, video_first: bool
) -> None:
    router = router_for(stack, refs_worker)
    parts = [(VIDEO, clip(clip_url())), (IMAGE, ref(data_url("rgba_203x151.png")))]
    if not video_first:
        parts.reverse()
    anchors, refs = zip(*parts, strict=True)
    ids = prompt(*anchors, "Compare.")
    direct = await fresh(refs_worker, refs_worker.address, request(ids, *refs))
    through = await fresh(refs_worker, router.address, request(ids, *refs, mode=mode))
    same(direct, through)


async def test_a_video_for_a_worker_that_wants_normalised_floats(
    stack: Stack, floats_worker: Worker
) -> None:
    router = router_for(stack, floats_worker)
    ids = prompt(VIDEO, "What happens?")
    direct = await fresh(floats_worker, floats_worker.address, request(ids, clip(clip_url())))
    same(direct, await fresh(floats_worker, router.address, request(ids, clip(clip_url()))))


async def test_a_video_is_found_again_within_a_mode(stack: Stack, refs_worker: Worker) -> None:
    """Between the modes it is not: vLLM hashes the frames that it took, we hash the file."""
    router = router_for(stack, refs_worker)
    await flush(refs_worker.address)
    ids = prompt(VIDEO, "What happens? " * 20)
    cold, warm, other = [
        await ask(router.address, request(ids, clip(clip_url()), mode=mode))
        for mode in (engine.ROUTER, engine.ROUTER, engine.WORKER)
    ]
    assert cold.cached_tokens == 0
    assert warm.cached_tokens > 0
    assert other.cached_tokens < warm.cached_tokens
    assert cold.ids == warm.ids == other.ids
