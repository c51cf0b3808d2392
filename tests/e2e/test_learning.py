"""Media that workers fetch by themselves are known again by what the workers call them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.prefix import learn
from router.wire import admin, common, engine
from tests.e2e.pairs import decoding, prefilling
from tests.media.server import Answer, Request, Server, fixed, running
from tests.serving import (
    MODEL,
    PICTURE,
    Serving,
    completes,
    data_url,
    eventually,
    image,
    seeing,
    serving,
    tokenized,
)
from workers.sim import SimOptions

PHOTO = "photo_640x480.jpg"
# 20 by 15 placeholders for it, and a token on either side.
PHOTO_BLOCKS = 302 // 16
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
CLIP = Path(__file__).parents[1] / "data" / "video" / "clip_320x240.mp4"


@asynccontextmanager
async def learning(*workers: SimOptions, **settings: Any) -> AsyncIterator[tuple[Serving, Server]]:
    """A router that forwards, follows its workers' events, and goes by nothing else.

    What it expects of its own choices counts for no time.
    """
    defaults = {
        "policy": "prefix",
        "mm_processing": "worker",
        "media_allow_private_hosts": True,
        "approximate_ttl": "100ms",
        "event_bridge": "100ms",
    }
    async with running() as host, serving(*workers, **{**defaults, **settings}) as served:
        await eventually(lambda: following(served) == readers(served) > 0, "events are followed")
        yield served, host


def following(served: Serving) -> int:
    found = [served.app.residents.of(worker) for worker in served.app.registry]
    return sum(one is not None and one.reporting for one in found)


def readers(served: Serving) -> int:
    return sum(worker.events.readers for worker in served.workers)


def learned(served: Serving) -> float:
    return served.metric("router_media_names_learned_total", model=MODEL)


def ambiguous(served: Serving) -> float:
    return served.metric("router_media_names_ambiguous_total", model=MODEL)


async def matched(served: Serving, request: engine.GenerateRequest) -> dict[str, int]:
    """Blocks that each worker is believed to hold, by its own reports alone."""
    # Nothing is expected any more once this is: a tick of 0.1 s has passed.
    await served.route(tokenized("tick " * 8))
    answer: admin.ExplainResponse = await served.admin.Explain(
        admin.ExplainRequest(request=request), timeout=10
    )
    return {w.address: w.matched_blocks for w in answer.workers}


async def taught(served: Serving, count: int, *requests: engine.GenerateRequest) -> str:
    """Sends requests, and waits until so many names are learned; the worker of the last."""
    home = served.workers[0].address
    for request in requests:
        home = (await served.route(request))["worker"]
    await eventually(lambda: learned(served) >= count, f"{count} names are learned")
    assert learned(served) == count
    return home


async def test_a_url_is_known_by_its_content_after_one_request() -> None:
    async with learning(SimOptions(), SimOptions()) as (served, host):
        host.routes["/photo.jpg"] = host.routes["/mirror.jpg"] = fixed(image(PHOTO))
        signed = "/photo.jpg?X-Amz-Date={0}&X-Amz-Signature={0}"
        home = await taught(served, 1, seeing(PICTURE, host.url(signed.format("one"))))
        again = seeing(PICTURE + " And?", host.url(signed.format("two")))
        assert (await matched(served, again))[home] == PHOTO_BLOCKS
        assert (await served.route(again))["worker"] == home
        # The same file, whichever way it comes, is the same blocks.
        at_hand = await matched(served, seeing(PICTURE, data_url(PHOTO)))
        assert at_hand[home] == PHOTO_BLOCKS
        # A mirror is another URL, until it was fetched once.
        mirror = host.url("/mirror.jpg")
        assert set((await matched(served, seeing(PICTURE, mirror))).values()) == {0}
        await taught(served, 2, seeing("Look: " + PICTURE, mirror))
        assert (await matched(served, seeing(PICTURE, mirror)))[home] == PHOTO_BLOCKS


async def test_tensors_of_the_file_match_what_a_worker_fetched() -> None:
    async with learning(SimOptions(), allow_mm_override=True) as (served, host):
        host.routes["/photo.jpg"] = fixed(image(PHOTO))
        home = await taught(served, 1, seeing(PICTURE, host.url("/photo.jpg")))
        here = seeing(PICTURE, host.url("/photo.jpg"))
        here.router.mm_processing = engine.ROUTER
        assert (await matched(served, here))[home] == PHOTO_BLOCKS


async def test_another_picture_of_the_size_never_matches() -> None:
    async with learning(SimOptions(), SimOptions()) as (served, host):
        host.routes["/one.png"] = fixed(image("grey_203x151.png"))
        host.routes["/two.png"] = fixed(image("palette_203x151.png"))
        one, two = host.url("/one.png"), host.url("/two.png")
        before = "word " * 20
        home = await taught(served, 1, seeing(before + PICTURE, one))
        same = (await matched(served, seeing(before + PICTURE, one)))[home]
        other = (await matched(served, seeing(before + PICTURE, two)))[home]
        assert same > other == 101 // 16
        await taught(served, 2, seeing("x" + before + PICTURE, two))
        assert (await matched(served, seeing(before + PICTURE, two)))[home] == other


async def test_pictures_that_run_at_once_with_the_same_words_are_not_mixed_up() -> None:
    both_there = asyncio.Event()

    def held(name: str) -> Answer:
        whole = fixed(image(name))

        async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
            # Sizes are told at once, the whole file when both requests are at the worker.
            if "range" not in request.headers:
                await both_there.wait()
            await whole(request, writer)

        return answer

    async with learning(SimOptions(media_timeout=60)) as (served, host):
        host.routes["/one.png"] = held("grey_203x151.png")
        host.routes["/two.png"] = held("palette_203x151.png")
        both = [seeing(PICTURE, host.url(path)) for path in ("/one.png", "/two.png")]
        calls = [served.stub.Generate(request, timeout=60) for request in both]
        await eventually(lambda: served.workers[0].stats.live == 2)
        both_there.set()
        for call in calls:
            async for _ in call:
                pass
        await eventually(lambda: ambiguous(served) == 2)
        assert learned(served) == 0
        # Apart from each other they are no riddle.
        await taught(served, 1, seeing("One: " + PICTURE, host.url("/one.png")))


async def test_a_converted_file_is_known_by_what_the_worker_calls_it() -> None:
    async with learning(SimOptions()) as (served, host):
        host.routes["/clear.png"] = fixed(image("rgba_203x151.png"))
        for number, url in enumerate((host.url("/clear.png"), data_url("rgba_203x151.png"))):
            prompt = f"{number} " + PICTURE
            counts = completes(await served.generate(seeing(prompt, url)))[0]
            home = await taught(served, number + 1)
            blocks = await matched(served, seeing(prompt, url))
            assert blocks[home] == counts.prompt_tokens // 16


async def test_a_local_file_is_known_like_any_other() -> None:
    folder = (Path(__file__).parents[1] / "data" / "images").resolve()
    async with learning(SimOptions(local_root=folder), media_local_root=str(folder)) as (served, _):
        url = (folder / PHOTO).as_uri()
        home = await taught(served, 1, seeing(PICTURE, url))
        assert (await matched(served, seeing(PICTURE, url)))[home] == PHOTO_BLOCKS


async def test_a_clip_is_known_with_its_frames() -> None:
    async with learning(SimOptions()) as (served, host):
        host.routes["/clip.mp4"] = fixed(CLIP.read_bytes())
        at_hand = "data:video/mp4;base64," + base64.b64encode(CLIP.read_bytes()).decode()
        for number, url in enumerate((host.url("/clip.mp4"), at_hand)):
            request = tokenized(f"{number} " + VIDEO + " And?")
            request.media_refs.items.add(modality=common.VIDEO, url=url)
            responses = await served.generate(request)
            tokens = completes(responses)[0].prompt_tokens
            await taught(served, number + 1)
            assert max((await matched(served, request)).values()) == tokens // 16


async def test_a_host_that_does_not_tell_sizes_is_no_obstacle() -> None:
    async with learning(SimOptions(), SimOptions()) as (served, host):
        whole = fixed(image(PHOTO))

        async def no_ranges(request: Any, writer: Any) -> None:
            answer = fixed(status="403 Forbidden") if "range" in request.headers else whole
            await answer(request, writer)

        host.routes["/photo.jpg"] = no_ranges
        request = seeing(PICTURE + " and more words than a block has", host.url("/photo.jpg"))
        ask = admin.ExplainRequest(request=request)
        before = await served.admin.Explain(ask, timeout=10)
        home = await taught(served, 1, request)
        after = await served.admin.Explain(ask, timeout=10)
        length = len(request.tokenized.input_ids) - 1
        assert (before.items[0].tokens, before.estimated_tokens) == (880, length + 880)
        assert (after.items[0].tokens, after.estimated_tokens) == (300, length + 300)
        assert (await matched(served, request))[home] == (length + 300) // 16


async def test_several_pictures_are_learned_at_once_and_a_new_one_beside_them() -> None:
    async with learning(SimOptions()) as (served, host):
        names = ("photo_640x480.jpg", "noise_299x211.jpg", "icc_203x151.jpg")
        for name in names:
            host.routes["/" + name] = fixed(image(name))
        urls = [host.url("/" + name) for name in names]
        home = await taught(served, 2, seeing(PICTURE * 2, *urls[:2]))
        prompt = "words " * 3 + PICTURE * 3
        await taught(served, 3, seeing(prompt, *urls))
        counts = completes(await served.generate(seeing(prompt, *urls)))[0]
        assert (await matched(served, seeing(prompt, *urls)))[home] == counts.prompt_tokens // 16


async def test_what_is_behind_a_url_may_change() -> None:
    async with learning(SimOptions()) as (served, host):
        url = host.url("/photo.jpg")
        host.routes["/photo.jpg"] = fixed(image("icc_203x151.jpg"))
        home = await taught(served, 1, seeing(PICTURE, url))
        host.routes["/photo.jpg"] = fixed(image("progressive_203x151.jpg"))
        await taught(served, 2, seeing(PICTURE, url))
        new, old = data_url("progressive_203x151.jpg"), data_url("icc_203x151.jpg")
        by_url = (await matched(served, seeing("New: " + PICTURE, url)))[home]
        assert by_url == (await matched(served, seeing("New: " + PICTURE, new)))[home] == 0
        assert (await matched(served, seeing(PICTURE, url)))[home] > 0
        assert (await matched(served, seeing(PICTURE, old)))[home] > 0


async def test_the_prefill_leg_teaches() -> None:
    prefill, decode = prefilling(kv_role="kv_producer"), decoding(kv_role="kv_consumer")
    async with learning(prefill, decode) as (served, host):
        host.routes["/photo.jpg"] = fixed(image(PHOTO))
        await taught(served, 1, seeing(PICTURE, host.url("/photo.jpg")))
        at = await matched(served, seeing(PICTURE, host.url("/photo.jpg")))
        assert at[served.workers[0].address] == PHOTO_BLOCKS


@pytest.mark.parametrize(
    ("settings", "credit", "watches"),
    [
        ({"policy": "least_load"}, None, 0),
        ({"policy": "prefix", "prefix_credit": 0}, None, 0),
        ({"policy": "prefix"}, 0.0, 0),
        ({"policy": "prefix"}, None, 1),
    ],
)
async def test_nothing_is_watched_where_prefixes_do_not_count(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], credit: float | None, watches: int
) -> None:
    watched: list[object] = []
    monkeypatch.setattr(learn.Listener, "watch", lambda self, references: watched.append(self))
    forwarding = {"mm_processing": "worker", "media_allow_private_hosts": True}
    async with running() as host, serving(SimOptions(), **forwarding, **settings) as served:
        host.routes["/photo.jpg"] = fixed(image(PHOTO))
        request = seeing(PICTURE, host.url("/photo.jpg"))
        if credit is not None:
            request.router.prefix_credit = credit
        if settings == {"policy": "prefix"}:
            await eventually(lambda: following(served) == 1)
        await served.route(request)
        await served.route(tokenized("words " * 40))
        assert len(watched) == watches
