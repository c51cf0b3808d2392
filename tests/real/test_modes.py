"""Where pictures become tensors does not change the answer.

Asked with a reference, directly or through a router that passes it on, the
worker runs vLLM's own processor; asked through a router that processes, it gets
our tensors. Token ids must be the same, and the logprobs too, since what
reaches the engine should be the same to the bit. Caches are emptied before each
request, so that every answer is computed from what was sent.
"""

from __future__ import annotations

import pytest

from router.wire import engine
from tests.real.asking import (
    IMAGE,
    IMAGES,
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

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PICTURES = [
    "photo_640x480.jpg",
    "portrait_720x1280_prog.jpg",
    "photo_333x517_422.jpg",
    "grey_203x151.jpg",
    "cmyk_203x151.jpg",
    "exif_6_24x16.jpg",
    "exif_7_24x16.jpg",
    "rgba_203x151.png",
    "la_203x151.png",
    "palette_trns_203x151.png",
    "rgb_trns_203x151.png",
    "grey16_203x151.png",
    "bits1_203x151.png",
    "still_203x151.gif",
    "transparent_203x151.gif",
    "animated_203x151.gif",
    "photo_1008x1344.webp",
    "rgba_203x151.webp",
    "solid_61x43.bmp",
    "photo_203x151.tif",
    "photo_203x151.avif",
    "tiny_20x30.png",
    "thin_1000x64.jpg",
]


def same(one: Answer, other: Answer) -> None:
    """Equal to the bit: ids, logprobs, the prompt's length."""
    assert one.prompt_tokens == other.prompt_tokens
    assert one.choices.keys() == other.choices.keys()
    for index, choice in one.choices.items():
        assert choice.ids == other.choices[index].ids
        assert choice.logprobs == other.choices[index].logprobs
        assert choice.finish_reason == other.choices[index].finish_reason


async def fresh(worker: Worker, address: str, asked: engine.GenerateRequest) -> Answer:
    await flush(worker.address)
    answer = await ask(address, asked)
    assert answer.cached_tokens == 0
    assert answer.choices[0].ids, "an answer without ids proves nothing"
    return answer


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_text_comes_back_as_the_worker_gave_it(
    stack: Stack, tensors_worker: Worker, stream: bool
) -> None:
    router = router_for(stack, tensors_worker)
    asked = request(prompt("Tell me about the weather of tomorrow."), stream=stream)
    direct = await fresh(tensors_worker, tensors_worker.address, asked)
    same(direct, await fresh(tensors_worker, router.address, asked))


@pytest.mark.parametrize("picture", PICTURES)
async def test_a_picture_means_the_same_wherever_it_is_processed(
    stack: Stack, refs_worker: Worker, picture: str
) -> None:
    router = router_for(stack, refs_worker)
    ids = prompt(IMAGE, "What is in the picture?")
    url = ref(data_url(picture))
    direct = await fresh(refs_worker, refs_worker.address, request(ids, url))
    for mode, name in ((engine.WORKER, "worker"), (engine.ROUTER, "router")):
        answer = await fresh(refs_worker, router.address, request(ids, url, mode=mode))
        assert answer.trailers["mmrouter-mode"] == name
        same(direct, answer)


async def test_different_pictures_have_different_answers(stack: Stack, refs_worker: Worker) -> None:
    """Else equal answers would prove nothing."""
    ids = prompt(IMAGE, "What is in the picture?")
    answers = set()
    for picture in ("photo_640x480.jpg", "text_800x1000.png", "noise_299x211.jpg"):
        answer = await fresh(refs_worker, refs_worker.address, request(ids, ref(data_url(picture))))
        answers.add((tuple(answer.ids), tuple(answer.choices[0].logprobs)))
    assert len(answers) == 3


@pytest.mark.parametrize("picture", ["photo_640x480.jpg", "rgba_203x151.png", "exif_6_24x16.jpg"])
async def test_a_worker_without_a_media_processor_gets_the_same_tensors(
    stack: Stack, refs_worker: Worker, tensors_worker: Worker, picture: str
) -> None:
    router = router_for(stack, tensors_worker)
    ids = prompt(IMAGE, "What is in the picture?")
    url = ref(data_url(picture))
    direct = await fresh(refs_worker, refs_worker.address, request(ids, url))
    same(direct, await fresh(tensors_worker, router.address, request(ids, url)))


@pytest.mark.parametrize(
    "picture", ["photo_640x480.jpg", "rgba_203x151.png", "still_203x151.gif", "grey16_203x151.png"]
)
async def test_a_worker_that_wants_normalised_floats_gets_them(
    stack: Stack, floats_worker: Worker, picture: str
) -> None:
    router = router_for(stack, floats_worker)
    ids = prompt(IMAGE, "What is in the picture?")
    url = ref(data_url(picture))
    direct = await fresh(floats_worker, floats_worker.address, request(ids, url))
    same(direct, await fresh(floats_worker, router.address, request(ids, url)))


async def test_a_fleet_of_both_pixel_formats_gives_one_answer(
    stack: Stack, tensors_worker: Worker, floats_worker: Worker
) -> None:
    router = router_for(stack, tensors_worker, floats_worker)
    ids = prompt(IMAGE, "What is in the picture?")
    asked = request(ids, ref(data_url("photo_640x480.jpg")))
    direct = {
        floats_worker.address: await fresh(floats_worker, floats_worker.address, asked),
        tensors_worker.address: await fresh(
            tensors_worker, router_for(stack, tensors_worker).address, asked
        ),
    }
    for _ in range(4):
        await flush(tensors_worker.address, floats_worker.address)
        answer = await ask(router.address, asked)
        same(direct[answer.trailers["mmrouter-worker"]], answer)


@pytest.mark.parametrize("mode", [engine.ROUTER, engine.WORKER], ids=["router", "worker"])
async def test_data_http_and_inline_bytes_are_one_picture(
    stack: Stack, refs_worker: Worker, media_host: MediaHost, mode: engine.MmProcessing
) -> None:
    router = router_for(stack, refs_worker)
    ids = prompt(IMAGE, "What is in the picture?")
    name = "photo_640x480.jpg"
    direct = await fresh(refs_worker, refs_worker.address, request(ids, ref(data_url(name))))
    sources: list[str | bytes] = [data_url(name), media_host.url(name)]
    if mode == engine.ROUTER:
        # A worker knows no inline bytes, so they cannot be passed on.
        sources.append((IMAGES / name).read_bytes())
    for source in sources:
        same(direct, await fresh(refs_worker, router.address, request(ids, ref(source), mode=mode)))


@pytest.mark.parametrize("mode", [engine.ROUTER, engine.WORKER], ids=["router", "worker"])
async def test_several_pictures_keep_their_order(
    stack: Stack, refs_worker: Worker, media_host: MediaHost, mode: engine.MmProcessing
) -> None:
    router = router_for(stack, refs_worker)
    ids = prompt("First ", IMAGE, " then ", IMAGE, IMAGE, " Compare.")
    urls = [
        ref(data_url("photo_333x517_422.jpg")),
        ref(media_host.url("rgba_203x151.png")),
        ref(data_url("exif_6_24x16.jpg")),
    ]
    direct = await fresh(refs_worker, refs_worker.address, request(ids, *urls))
    same(direct, await fresh(refs_worker, router.address, request(ids, *urls, mode=mode)))
    turned = await fresh(refs_worker, router.address, request(ids, *reversed(urls), mode=mode))
    assert turned.choices[0].logprobs != direct.choices[0].logprobs


@pytest.mark.parametrize("mode", [engine.ROUTER, engine.WORKER], ids=["router", "worker"])
async def test_one_picture_may_come_twice(
    stack: Stack, refs_worker: Worker, mode: engine.MmProcessing
) -> None:
    router = router_for(stack, refs_worker)
    ids = prompt(IMAGE, " and ", IMAGE, " Compare.")
    urls = [ref(data_url("photo_333x517_422.jpg"))] * 2
    direct = await fresh(refs_worker, refs_worker.address, request(ids, *urls))
    same(direct, await fresh(refs_worker, router.address, request(ids, *urls, mode=mode)))


@pytest.mark.parametrize("mode", [engine.ROUTER, engine.WORKER], ids=["router", "worker"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_several_choices_come_back_complete(
    stack: Stack, refs_worker: Worker, mode: engine.MmProcessing, stream: bool
) -> None:
    router = router_for(stack, refs_worker)
    ids = prompt(IMAGE, "What is in the picture?")

    def two(mode: engine.MmProcessing) -> engine.GenerateRequest:
        asked = request(ids, ref(data_url("photo_640x480.jpg")), mode=mode, stream=stream)
        asked.sampling_params.n = 2
        # Several greedy choices would be one and are refused; a seed makes these repeatable.
        asked.sampling_params.temperature = 0.8
        asked.sampling_params.seed = 7
        return asked

    # One choice may be served from what the other has computed.
    await flush(refs_worker.address)
    direct = await ask(refs_worker.address, two(engine.UNSPECIFIED))
    assert set(direct.choices) == {0, 1}
    assert direct.choices[0].ids != direct.choices[1].ids
    await flush(refs_worker.address)
    answer = await ask(router.address, two(mode))
    assert {i: c.ids for i, c in answer.choices.items()} == {
        i: c.ids for i, c in direct.choices.items()
    }


@pytest.mark.parametrize("mode", [engine.ROUTER, engine.WORKER], ids=["router", "worker"])
async def test_prompt_logprobs_of_a_picture_pass(
    stack: Stack, refs_worker: Worker, mode: engine.MmProcessing
) -> None:
    """Each token of the expanded prompt has its own: the whole input is compared."""
    router = router_for(stack, refs_worker)
    ids = prompt(IMAGE, "What is in the picture?")
    asked = request(ids, ref(data_url("photo_333x517_422.jpg")), mode=mode, stream=False)
    asked.sampling_params.prompt_logprobs = 1
    direct, through = [
        (await fresh(refs_worker, address, asked)).prompt_logprobs
        for address in (refs_worker.address, router.address)
    ]
    assert len(direct) > 150
    assert through == direct
