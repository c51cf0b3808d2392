"""Event batches as workers send them, in few words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router.prefix.blocks import BlockExtras, identifier_digest
from router.prefix.changes import Stored
from router.wire.common_pb2 import (
    EngineLoad,
    KvBlock,
    KvBlockExtraKey,
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheCleared,
    KvCacheEvent,
    KvEventBatch,
    KvMultimodalKey,
    KvSnapshotChunk,
)

SIZE = 4


def ids(n: int, start: int = 0) -> np.ndarray:
    """Token ids of n blocks."""
    return np.arange(start, start + SIZE * n, dtype=np.uint32)


def picture(identifier: str, offset: int) -> KvBlockExtraKey:
    return KvBlockExtraKey(multimodal=KvMultimodalKey(identifier=identifier, offset=offset))


def stored(
    tokens: np.ndarray,
    *,
    first: int = 100,
    parent: int | None = None,
    extras: Sequence[Sequence[KvBlockExtraKey]] = (),
    **fields: object,
) -> KvCacheEvent:
    """A run of blocks with engine hashes from `first` on; `extras[i]` belongs to block i."""
    blocks = [
        KvBlock(
            block_hash=first + i,
            token_ids=tokens[SIZE * i : SIZE * (i + 1)].tolist(),
            block_size=SIZE,
            extra_keys=extras[i] if i < len(extras) else (),
        )
        for i in range(len(tokens) // SIZE)
    ]
    return KvCacheEvent(
        stored=KvBlocksStored(blocks=blocks, parent_block_hash=parent, **fields)  # type: ignore[arg-type]
    )


def removed(*hashes: int, **fields: object) -> KvCacheEvent:
    return KvCacheEvent(removed=KvBlocksRemoved(block_hashes=hashes, **fields))  # type: ignore[arg-type]


def cleared() -> KvCacheEvent:
    return KvCacheEvent(cleared=KvCacheCleared())


def batch(number: int, *events: KvCacheEvent, rank: int = 0) -> KvEventBatch:
    return KvEventBatch(sequence_number=number, dp_rank=rank, events=events)


def beat(number: int, *, sample: int = 0, waiting: int = 0) -> KvEventBatch:
    """A load record without events."""
    load = EngineLoad(load_only=True, sample=sample, waiting_requests=waiting)
    return KvEventBatch(sequence_number=number, load=load)


def chunk(index: int, count: int, number: int, *events: KvCacheEvent) -> KvEventBatch:
    return KvEventBatch(
        sequence_number=number, snapshot=KvSnapshotChunk(index=index, count=count), events=events
    )


def run_of(tokens: np.ndarray, media: Sequence[tuple[str, int, int]], size: int) -> Stored:
    """The full blocks of a prompt with (identifier, offset, length) items, as one run."""
    blocks = len(tokens) // size
    starts, digests, offsets, names = [0], [], [], []
    for block in range(blocks):
        for name, offset, length in media:
            if offset < (block + 1) * size and offset + length > block * size:
                digests.append(identifier_digest(name))
                offsets.append(offset - block * size)
                names.append(name)
        starts.append(len(digests))
    extras = BlockExtras(
        np.array(starts, np.int64),
        np.array(digests, np.uint64),
        np.array(offsets, np.int64),
        tuple(names),
    )
    return Stored(np.arange(blocks), None, tokens[: blocks * size], size, extras)
