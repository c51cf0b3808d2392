"""How a worker's stream is kept open."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence

import pytest

from router.prefix.blocks import PromptBlocks
from router.prefix.index import IndexSettings, PrefixIndex
from router.prefix.resident import Resident
from router.prefix.subscription import StreamEnded, Subscription
from router.wire.common_pb2 import EngineLoad, KvEventBatch
from tests.prefix.batches import SIZE, batch, beat, ids, stored

Script = Sequence[KvEventBatch | StreamEnded]


class Worker:
    """Plays one script a stream; the last stream is silent until it is cancelled."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.opened = 0
        self.open = 0
        self.pauses: list[float] = []
        self.loads: list[tuple[int, int]] = []
        self.silent = asyncio.Event()
        self.index = PrefixIndex(IndexSettings(blocks=64, expected_blocks=64), seed=1)
        self.resident = Resident(self.index, SIZE)

    async def stream(self) -> AsyncGenerator[KvEventBatch, None]:
        self.opened += 1
        self.open += 1
        try:
            if not self.scripts:
                self.silent.set()
                await asyncio.Event().wait()
            for step in self.scripts.pop(0):
                if isinstance(step, StreamEnded):
                    raise step
                yield step
        finally:
            self.open -= 1

    def heard(self, rank: int, load: EngineLoad) -> None:
        self.loads.append((rank, load.waiting_requests))

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def follow(self) -> None:
        """Runs a subscription until all scripts are played."""
        subscription = Subscription(
            "w", self.resident, self.stream, self.heard, sleep=self.sleep, rng=random.Random(1)
        )
        task = asyncio.create_task(subscription.run())
        waiting = asyncio.create_task(self.silent.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        for one in (task, waiting):
            one.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
        assert self.open == 0

    def has(self, n: int) -> int:
        return int(self.index.match(PromptBlocks(ids(n), seed=1).keys(SIZE), [0]).blocks.max())


async def test_unimplemented_leaves_the_worker_to_approximation() -> None:
    worker = Worker([StreamEnded("UNIMPLEMENTED")], [batch(1)])
    await worker.follow()
    assert worker.opened == 1
    assert not worker.resident.reporting


@pytest.mark.parametrize("code", ["DATA_LOSS", "OUT_OF_RANGE"])
async def test_lost_data_begin_anew_from_nothing(code: str) -> None:
    worker = Worker([batch(1, stored(ids(2))), StreamEnded(code)], [batch(1, stored(ids(1)))])
    await worker.follow()
    assert worker.opened == 3
    assert worker.has(2) == 1


async def test_a_lost_connection_keeps_what_is_still_true() -> None:
    worker = Worker(
        [batch(1, stored(ids(2))), StreamEnded("UNAVAILABLE")],
        [StreamEnded("UNAVAILABLE")],
        [beat(1)],
    )
    await worker.follow()
    assert worker.has(2) == 2


async def test_what_a_worker_had_vanishes_when_it_cannot_be_reached() -> None:
    down = [StreamEnded("UNAVAILABLE")]
    started = [batch(1, stored(ids(2))), *down]
    # Short outages, more often than one long one would be borne.
    flaky = [*[down] * 3, [beat(1), *down]]
    worker = Worker(started, *flaky * 4)
    await worker.follow()
    assert sum(worker.pauses) > 5
    assert worker.has(2) == 2
    killed = Worker(started, *[down] * 8)
    await killed.follow()
    assert killed.has(2) == 0
    # Another engine at the address is known by what it reports, whatever its numbers.
    again = Worker(started, *[down] * 8, [batch(2, stored(ids(1)))])
    await again.follow()
    assert again.has(2) == 1


async def test_a_gap_opens_one_new_stream() -> None:
    worker = Worker([batch(1, stored(ids(2))), batch(5), batch(6), batch(9)])
    await worker.follow()
    assert worker.opened == 2
    assert worker.has(2) == 0


async def test_pauses_grow_until_a_batch_comes() -> None:
    down = [StreamEnded("UNAVAILABLE")]
    worker = Worker(down, down, down, [batch(1), StreamEnded("UNAVAILABLE")], down)
    await worker.follow()
    p = worker.pauses
    assert p[0] < p[1] < p[2]
    assert p[3] < p[2]
    assert max(p) <= 6


async def test_load_records_are_handed_on() -> None:
    worker = Worker([beat(0, sample=1, waiting=3)])
    await worker.follow()
    assert worker.loads == [(0, 3)]


async def test_a_worker_reports_while_its_stream_brings_something() -> None:
    worker = Worker()
    seen: list[bool] = []

    async def stream() -> AsyncGenerator[KvEventBatch, None]:
        seen.append(worker.resident.reporting)
        yield beat(0)
        seen.append(worker.resident.reporting)
        raise StreamEnded("UNIMPLEMENTED")

    await Subscription("w", worker.resident, stream, worker.heard).run()
    assert [*seen, worker.resident.reporting] == [False, True, False]
