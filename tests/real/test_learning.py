"""What a worker calls media that it fetched by itself is learned from its events."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from router.wire import admin, common, engine, router_pb2_grpc
from tests.real.asking import (
    IMAGE,
    LIMITS,
    VIDEO,
    ask,
    data_url,
    flush,
    prompt,
    ref,
    request,
)
from tests.real.conftest import router_for
from tests.real.media_host import MediaHost
from tests.real.stack import Router, Stack, Worker

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

BY_PREFIX = ("--policy", "prefix", "--mm-processing", "worker", "--media-allow-private-hosts")
BLOCK = 128
BEFORE, AFTER = "Some words ahead of it. " * 30, "And some words behind it, to ask. " * 30


@pytest.fixture
async def router(stack: Stack, refs_worker: Worker) -> Router:
    """One that follows the worker's events, of which some have come in."""
    router = router_for(stack, refs_worker, flags=BY_PREFIX)
    while not router.metric("router_prefix_index_blocks"):
        await flush(refs_worker.address)
        await ask(router.address, request(prompt("Wake up. " * 60)))
        await asyncio.sleep(0.1)
    await flush(refs_worker.address)
    return router


async def matched(router: Router, asked: engine.GenerateRequest) -> int:
    """Blocks of the prompt that the worker is believed to hold."""
    async with grpc.aio.insecure_channel(router.address, LIMITS) as channel:
        stub = router_pb2_grpc.RouterAdminStub(channel)
        shown = await stub.Explain(admin.ExplainRequest(request=asked), timeout=60)
    (worker,) = shown.workers
    return int(worker.matched_blocks)


async def until_learned(router: Router, count: float) -> None:
    while router.metric("router_media_names_learned_total") < count:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    assert router.metric("router_media_names_learned_total") == count


@pytest.mark.parametrize("name", ["photo_640x480.jpg", "rgba_203x151.png", "palette_203x151.png"])
async def test_a_url_matches_what_the_worker_reports_of_its_file(
    router: Router, media_host: MediaHost, name: str
) -> None:
    before = router.metric("router_media_names_learned_total")
    asked = request(prompt(BEFORE, IMAGE, AFTER), ref(media_host.url(name)))
    answer = await ask(router.address, asked)
    await until_learned(router, before + 1)
    # Another name, so nothing counts but the worker's reports.
    assert await matched(router, asked) == answer.prompt_tokens // BLOCK
    signed = media_host.url(name + "?X-Amz-Date=later&X-Amz-Signature=other")
    asked = request(prompt(BEFORE, IMAGE, AFTER), ref(signed))
    assert await matched(router, asked) == answer.prompt_tokens // BLOCK
    again = await ask(router.address, asked)
    assert again.cached_tokens == answer.prompt_tokens // BLOCK * BLOCK
    assert router.metric("router_media_names_ambiguous_total") == 0


async def test_a_mirror_and_a_file_at_hand_are_the_same_picture(
    router: Router, media_host: MediaHost
) -> None:
    before = router.metric("router_media_names_learned_total")
    one, mirror = (media_host.url(f"icc_203x151.jpg?copy={n}") for n in (1, 2))
    answer = await ask(router.address, request(prompt(BEFORE, IMAGE, AFTER), ref(one)))
    await ask(router.address, request(prompt("Another. " * 60, IMAGE, AFTER), ref(mirror)))
    await until_learned(router, before + 2)
    for same in (mirror, data_url("icc_203x151.jpg")):
        asked = request(prompt(BEFORE, IMAGE, AFTER), ref(same))
        assert await matched(router, asked) == answer.prompt_tokens // BLOCK
    other = request(prompt(BEFORE, IMAGE, AFTER), ref(data_url("progressive_203x151.jpg")))
    assert await matched(router, other) < answer.prompt_tokens // BLOCK


async def test_pictures_in_one_prompt_are_told_apart(router: Router, media_host: MediaHost) -> None:
    before = router.metric("router_media_names_learned_total")
    urls = [media_host.url(f"{name}?several") for name in ("grey_203x151.png", "la_203x151.png")]
    asked = request(prompt(BEFORE, IMAGE, "or", IMAGE, AFTER), *map(ref, urls))
    answer = await ask(router.address, asked)
    await until_learned(router, before + 2)
    assert await matched(router, asked) == answer.prompt_tokens // BLOCK
    turned = request(prompt(BEFORE, IMAGE, "or", IMAGE, AFTER), *map(ref, reversed(urls)))
    assert await matched(router, turned) < answer.prompt_tokens // BLOCK


async def test_a_clip_is_learned_with_its_frames(router: Router, media_host: MediaHost) -> None:
    before = router.metric("router_media_names_learned_total")
    clip = ref(media_host.url("clip_320x240.mp4"), common.VIDEO)
    asked = request(prompt(BEFORE, VIDEO, AFTER), clip)
    answer = await ask(router.address, asked)
    await until_learned(router, before + 1)
    assert await matched(router, asked) == answer.prompt_tokens // BLOCK
