"""Tensors that a worker on the same host takes from shared memory.

The servicer removes a segment when it has read one tensor from it.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from router.wire import common, engine
from tests.real.asking import (
    DEADLINE,
    IMAGE,
    VIDEO,
    VIDEOS,
    ask,
    connect,
    data_url,
    flush,
    prompt,
    ref,
    request,
)
from tests.real.conftest import FLAGS
from tests.real.recorder import Recorder, recording
from tests.real.stack import Router, Stack, Worker
from tests.real.test_modes import same
from tests.real.waiting import until_idle

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Hop:
    """A router that shares whatever it can, and what passes between it and its worker."""

    router: Router
    recorder: Recorder

    def last(self) -> engine.GenerateRequest:
        raw = self.recorder.of("Generate")[-1].raw_request
        return engine.GenerateRequest.FromString(raw)


@pytest.fixture(scope="module")
def hop(stack: Stack) -> Iterator[Hop]:
    with recording(stack.worker("refs").address) as recorder:
        router = stack.router("--worker", recorder.address, "--shm-min-bytes", "1KiB", *FLAGS)
        yield Hop(router, recorder)
        router.stop()


def video() -> engine.MediaRef:
    clip = base64.b64encode((VIDEOS / "clip_320x240.mp4").read_bytes()).decode()
    return ref(f"data:video/mp4;base64,{clip}", common.VIDEO)


def segments() -> list[str]:
    """Whatever a router has left in shared memory; a file that marks a living one aside."""
    return [p.name for p in Path("/dev/shm").glob("mmrouter-*") if p.suffix != ".lock"]


def payloads(sent: engine.GenerateRequest) -> list[str | None]:
    batches = [sent.mm_inputs, *sent.extra_mm_inputs]
    return [batch.pixel_values.WhichOneof("payload") for batch in batches]


async def test_pixels_that_are_shared_are_the_pixels_that_are_sent(
    hop: Hop, refs_worker: Worker
) -> None:
    ids = prompt(IMAGE, IMAGE, "Compare.")
    pictures = [ref(data_url(name)) for name in ("photo_333x517_422.jpg", "rgba_203x151.png")]
    await flush(refs_worker.address)
    direct = await ask(refs_worker.address, request(ids, *pictures))
    await flush(refs_worker.address)
    shared = await ask(hop.router.address, request(ids, *pictures))
    assert payloads(hop.last()) == ["shm"]
    same(direct, shared)
    assert segments() == []


async def test_a_batch_each_of_two_modalities_is_shared(hop: Hop, refs_worker: Worker) -> None:
    ids = prompt(VIDEO, IMAGE, "Compare.")
    media = [video(), ref(data_url("photo_333x517_422.jpg"))]
    await flush(refs_worker.address)
    direct = await ask(refs_worker.address, request(ids, *media))
    await flush(refs_worker.address)
    shared = await ask(hop.router.address, request(ids, *media))
    assert payloads(hop.last()) == ["shm", "shm"]
    same(direct, shared)
    assert segments() == []


async def test_a_request_that_is_given_up_leaves_nothing(hop: Hop, refs_worker: Worker) -> None:
    asked = request(
        prompt(IMAGE, "Tell me all."), ref(data_url("photo_333x517_422.jpg")), max_tokens=1500
    )
    async with connect(hop.router.address) as stub:
        # At whatever moment: while it is prepared, sent, computed or answered.
        for reads in (0, 0, 1, 2):
            call = stub.Generate(asked, timeout=DEADLINE)
            for _ in range(reads):
                await call.read()
            await asyncio.sleep(0)
            call.cancel()
    await until_idle(refs_worker.address)
    while hop.router.metric("router_requests_in_flight"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert segments() == []
