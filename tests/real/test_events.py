"""What a worker reports of its cache is what we compute of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from router.prefix.blocks import MediaSpan, PromptBlocks
from router.prefix.events import EventReader, Loaded, Resync
from router.prefix.index import PrefixIndex
from router.wire import common, engine
from tests.real.asking import (
    DEADLINE,
    IMAGE,
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

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


class Listener:
    """A subscription to a worker's events, applied to an index as they come."""

    def __init__(self, address: str) -> None:
        self.index = PrefixIndex()
        self.holder = self.index.join()
        self.reader = EventReader()
        self.loads: list[common.EngineLoad] = []
        self._address = address
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Listener:
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def until_held(self, blocks: PromptBlocks, count: int) -> None:
        """Waits until the worker holds the first `count` blocks; the test's timeout ends it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._failed() or self.held(blocks) >= count)
        if self._failed():
            await self._task

    def held(self, blocks: PromptBlocks) -> int:
        if self.reader.block_size is None:
            return 0
        keys = blocks.keys(self.reader.block_size)
        return int(self.index.match(keys, [self.holder]).blocks[self.holder])

    def _failed(self) -> bool:
        return self._task.done()

    async def _listen(self) -> None:
        try:
            async with connect(self._address) as stub:
                async for batch in stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()):
                    async with self._changed:
                        self._apply(batch)
                        self._changed.notify_all()
        finally:
            async with self._changed:
                self._changed.notify_all()

    def _apply(self, batch: common.KvEventBatch) -> None:
        for action in self.reader.apply(batch):
            assert not isinstance(action, Resync), action
            if isinstance(action, Loaded):
                self.loads.append(action.load)
            else:
                self.index.apply(self.holder, action)


@pytest.fixture(scope="module")
def hop(stack: Stack) -> Iterator[tuple[Router, Recorder]]:
    with recording(stack.worker("refs").address) as recorder:
        router = stack.router("--worker", recorder.address, *FLAGS)
        yield router, recorder
        router.stop()


def blocks_of(recorder: Recorder) -> PromptBlocks:
    """The blocks of the request with tensors that passed last."""
    sent = engine.GenerateRequest.FromString(recorder.of("Generate")[-1].raw_request)
    media = sent.mm_inputs
    return PromptBlocks(
        np.array(sent.tokenized.input_ids, np.uint32),
        [
            MediaSpan(identity, place.offset, place.length)
            for identity, place in zip(media.mm_hashes, media.mm_placeholders, strict=True)
        ],
    )


async def test_blocks_of_text_and_pictures_are_found_under_our_keys(
    refs_worker: Worker, hop: tuple[Router, Recorder]
) -> None:
    router, recorder = hop
    await flush(refs_worker.address)
    # The first picture begins and ends in the middle of blocks, and two share one.
    ids = prompt("Some words ahead of it. " * 30, IMAGE, IMAGE, "What are these?")
    pictures = [ref(data_url("photo_640x480.jpg")), ref(data_url("photo_333x517_422.jpg"))]
    async with Listener(refs_worker.address) as listener:
        # What was published before the subscription was ready is not repeated.
        while listener.reader.block_size is None:
            await flush(refs_worker.address)
            await ask(router.address, request(prompt("Wake up. " * 60)))
            await asyncio.sleep(0.1)
        answer = await ask(router.address, request(ids, *pictures, mode=engine.ROUTER))
        blocks = blocks_of(recorder)
        size = listener.reader.block_size
        assert size == 128
        await listener.until_held(blocks, answer.prompt_tokens // size)

        other = PromptBlocks(
            blocks.tokens, [MediaSpan("0" * 64, m.offset, m.length) for m in blocks.media]
        )
        assert listener.held(other) == blocks.media[0].offset // size

        # References lead to the same blocks, since the identity is the same.
        await flush(refs_worker.address)
        await ask(router.address, request(ids, *pictures, mode=engine.WORKER))
        await listener.until_held(blocks, answer.prompt_tokens // size)
        assert listener.reader.resyncs == 0


async def test_a_flushed_cache_is_reported_as_cleared(
    refs_worker: Worker, hop: tuple[Router, Recorder]
) -> None:
    router, recorder = hop
    async with Listener(refs_worker.address) as listener:
        while listener.reader.block_size is None:
            await flush(refs_worker.address)
            await ask(router.address, request(prompt("Wake up. " * 60)))
            await asyncio.sleep(0.1)
        ids = prompt("Another text. " * 60, IMAGE)
        await ask(router.address, request(ids, ref(data_url("grey_203x151.jpg"))))
        blocks = blocks_of(recorder)
        await listener.until_held(blocks, 2)
        await flush(refs_worker.address)
        # The engine publishes with its next step.
        later = PromptBlocks(np.array(prompt("And another one. " * 60), np.uint32))
        await ask(router.address, request(later.tokens.tolist()))
        await listener.until_held(later, 1)
        assert listener.held(blocks) == 0


async def test_the_stream_tells_the_load(refs_worker: Worker, hop: tuple[Router, Recorder]) -> None:
    router, _ = hop
    async with Listener(refs_worker.address) as listener:
        while not any(load.running_requests for load in listener.loads):
            await flush(refs_worker.address)
            await ask(router.address, request(prompt("Tell me all. " * 60), max_tokens=200))
        assert listener.loads[-1].max_running_requests == 8
        async with connect(refs_worker.address) as stub:
            loads = await stub.GetLoads(engine.GetLoadsRequest(), timeout=DEADLINE)
        assert loads.loads[0].max_running_requests == 8
