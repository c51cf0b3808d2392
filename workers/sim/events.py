"""The stream of KV cache events and load records that routers subscribe to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc

from router.wire import common
from workers.sim.kvcache import Removed, Stored
from workers.sim.refused import Refused

# Batches that a reader may lag behind before it has lost the thread.
BACKLOG = 4_096


@dataclass(frozen=True)
class Cleared:
    """Every block is gone."""


Change = Stored | Removed | Cleared


@dataclass(eq=False)
class _Reader:
    load_from_start: bool
    batches: asyncio.Queue[common.KvEventBatch | None] = field(
        default_factory=lambda: asyncio.Queue(BACKLOG)
    )
    primed: bool = False
    lost: bool = False

    def offer(self, batch: common.KvEventBatch) -> None:
        if self.lost:
            return
        if self.batches.full():
            self.lost = True
            return
        self.batches.put_nowait(batch)


class EventHub:
    """Numbers the batches and hands each to every reader; there is no history."""

    def __init__(self, load: Callable[[], common.EngineLoad], *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.sequence = 0
        self._load = load
        self._event_id = 0
        self._sample = 0
        self._readers: set[_Reader] = set()

    @property
    def readers(self) -> int:
        """How many subscriptions are open."""
        return len(self._readers)

    def publish(self, changes: Iterable[Change]) -> None:
        """One batch with these changes in their order; nothing when there are none."""
        events = list(self._events(changes))
        if not events or not self.enabled:
            return
        self.sequence += 1
        batch = self._batch(load_only=False)
        batch.events.extend(events)
        for reader in self._readers:
            reader.primed = True
            reader.offer(batch)

    def beat(self) -> None:
        """A load record alone; it repeats the number of the last batch."""
        batch = self._batch(load_only=True)
        for reader in self._readers:
            if reader.primed or reader.load_from_start:
                reader.offer(batch)

    def skip(self, count: int = 1) -> None:
        """Leaves a hole in the numbers, as if batches had been lost on the way."""
        self.sequence += count

    def cut(self) -> None:
        """Ends every subscription with DATA_LOSS, as after a restart of the engine."""
        for reader in self._readers:
            reader.lost = True
            if not reader.batches.full():
                reader.batches.put_nowait(None)

    async def subscribe(
        self, start: int, *, load_from_start: bool
    ) -> AsyncGenerator[common.KvEventBatch, None]:
        """Batches from now on, for as long as the caller reads.

        Refused: UNIMPLEMENTED when events are off, OUT_OF_RANGE for any start
        but 0, DATA_LOSS when the reader fell behind or the stream was cut.
        """
        if not self.enabled:
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, "KV cache events are switched off.")
        if start != 0:
            raise Refused(
                grpc.StatusCode.OUT_OF_RANGE,
                f"Events from {start} on are not kept; subscribe at 0.",
            )
        reader = _Reader(load_from_start)
        self._readers.add(reader)
        try:
            if load_from_start:
                yield self._batch(load_only=True)
            while True:
                batch = (
                    None if reader.lost and reader.batches.empty() else await reader.batches.get()
                )
                if batch is None:
                    raise Refused(
                        grpc.StatusCode.DATA_LOSS, "Events were lost; subscribe again at 0."
                    )
                yield batch
        finally:
            self._readers.discard(reader)

    def _batch(self, *, load_only: bool) -> common.KvEventBatch:
        self._sample += 1
        load = self._load()
        load.sample = self._sample
        load.load_only = load_only
        return common.KvEventBatch(
            sequence_number=self.sequence, timestamp=time.time(), dp_rank=0, load=load
        )

    def _events(self, changes: Iterable[Change]) -> Iterable[common.KvCacheEvent]:
        run: list[Stored] = []
        for change in changes:
            if isinstance(change, Stored) and (not run or change.parent == run[-1].block_hash):
                run.append(change)
                continue
            if run:
                yield self._event(stored=_stored(run))
                run = []
            match change:
                case Stored():
                    run = [change]
                case Removed(block_hashes=hashes):
                    yield self._event(
                        removed=common.KvBlocksRemoved(
                            block_hashes=hashes, tier=common.KV_CACHE_TIER_DEVICE
                        )
                    )
                case Cleared():
                    yield self._event(cleared=common.KvCacheCleared())
        if run:
            yield self._event(stored=_stored(run))

    def _event(
        self,
        *,
        stored: common.KvBlocksStored | None = None,
        removed: common.KvBlocksRemoved | None = None,
        cleared: common.KvCacheCleared | None = None,
    ) -> common.KvCacheEvent:
        self._event_id += 1
        return common.KvCacheEvent(
            event_id=self._event_id, stored=stored, removed=removed, cleared=cleared
        )


def _stored(run: Sequence[Stored]) -> common.KvBlocksStored:
    """A chain of blocks; each is the parent of the next."""
    return common.KvBlocksStored(
        parent_block_hash=run[0].parent,
        tier=common.KV_CACHE_TIER_DEVICE,
        medium="GPU",
        blocks=[
            common.KvBlock(
                block_hash=block.block_hash,
                token_ids=block.token_ids,
                block_size=len(block.token_ids),
                extra_keys=[
                    common.KvBlockExtraKey(
                        multimodal=common.KvMultimodalKey(
                            identifier=key.identifier, offset=key.offset
                        )
                    )
                    for key in block.extra
                ],
            )
            for block in run
        ],
    )
