"""Reads the event stream of one worker: what changed, and whether anything is missing.

Pure: batches in, actions out. Each rank of a worker counts its own batches. A
hole in the numbers makes what was reported worthless, because a removal may be
among the lost, so it ends in one resync: forget and subscribe anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from router.prefix.blocks import BlockExtras, identifier_digest
from router.prefix.changes import Change, Cleared, Lost, Removed, Stored, Tier
from router.wire.common_pb2 import (
    KV_CACHE_TIER_DEVICE,
    KV_CACHE_TIER_DISK,
    KV_CACHE_TIER_EXTERNAL,
    KV_CACHE_TIER_HOST,
    EngineLoad,
    KvBlock,
    KvBlocksRemoved,
    KvBlocksStored,
    KvEventBatch,
    KvSnapshotChunk,
)

_TIERS = {
    KV_CACHE_TIER_DEVICE: Tier.DEVICE,
    KV_CACHE_TIER_HOST: Tier.HOST,
    KV_CACHE_TIER_DISK: Tier.DISK,
    # A shared pool: it must be fetched from as far away.
    KV_CACHE_TIER_EXTERNAL: Tier.DISK,
}
_MEDIA = {"gpu": Tier.DEVICE, "cpu": Tier.HOST}

# Marks what is no media item among a block's extras; no item is that far away.
_NO_OFFSET = -(1 << 62)


@dataclass(frozen=True)
class Resync:
    """The stream must be closed and opened anew, once."""

    reason: str


@dataclass(frozen=True)
class Loaded:
    """The engine's load, newer than any before."""

    load: EngineLoad


Action = Change | Resync | Loaded


@dataclass
class _Rank:
    """What one rank sent."""

    # The number of its last batch, None before the first.
    cursor: int | None = None
    # Nothing came yet since the stream was opened.
    fresh: bool = True
    sample: int = 0
    # The next piece of the snapshot that is coming in.
    chunk: int = 0
    # KV cache groups whose blocks make up a prefix.
    groups: set[int] = field(default_factory=set)


class EventReader:
    """The state of one worker's stream, kept while the stream is closed and opened again.

    `block_size` is the worker's as its events show it, None before the first.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._resyncing = False
        self.block_size: int | None = None
        self.resyncs = 0
        self.repeated = 0

    def opened(self) -> None:
        """A stream was opened, at the present; its numbers will say whether anything is missing."""
        self._resyncing = False
        for rank in self._ranks.values():
            rank.fresh, rank.sample, rank.chunk = True, 0, 0

    def lost(self) -> list[int]:
        """The worker cannot continue where it was; returns the ranks that this makes unknown."""
        ranks = list(self._ranks)
        self._ranks.clear()
        return ranks

    def apply(self, batch: KvEventBatch) -> list[Action]:
        """What a batch means for its rank, in order. Batches known already mean nothing."""
        rank = self._ranks.setdefault(batch.dp_rank, _Rank())
        actions: list[Action] = []
        if batch.HasField("load") and self._is_newer(rank, batch.load):
            actions.append(Loaded(batch.load))
        if self._resyncing:
            return actions
        if batch.HasField("snapshot"):
            return actions + self._snapshot(rank, batch, batch.snapshot)
        number, load_only = batch.sequence_number, batch.load.load_only
        if load_only and number == 0:
            # Nothing was published yet, so what we remember is of another engine;
            # or the sender does not number its heartbeats.
            if rank.fresh and rank.cursor:
                rank.cursor = None
                self.resyncs += 1
                actions.append(Lost())
            return actions
        fresh, rank.fresh = rank.fresh, False
        if rank.cursor is not None:
            if number <= rank.cursor and (not fresh or (load_only and number == rank.cursor)):
                self.repeated += not load_only
                return actions
            if number != rank.cursor + 1 or load_only:
                if not fresh:
                    return actions + self._resync(rank, f"{rank.cursor} is followed by {number}")
                # Missed between two streams, or another engine: this stream is good.
                self.resyncs += 1
                actions.append(Lost())
        rank.cursor = number
        if not load_only:
            actions += self._changes(rank, batch)
        return actions

    def _resync(self, rank: _Rank, reason: str) -> list[Action]:
        self._resyncing = True
        self.resyncs += 1
        rank.cursor = None
        return [Lost(), Resync(reason)]

    @staticmethod
    def _is_newer(rank: _Rank, load: EngineLoad) -> bool:
        if load.sample and load.sample <= rank.sample:
            return False
        rank.sample = load.sample
        return True

    def _snapshot(self, rank: _Rank, batch: KvEventBatch, chunk: KvSnapshotChunk) -> list[Action]:
        actions: list[Action] = []
        if chunk.index == 0:
            # It replaces what was known.
            actions.append(Lost())
            rank.chunk = 0
        if chunk.index != rank.chunk:
            return self._resync(rank, f"piece {rank.chunk} of a snapshot is missing")
        rank.chunk += 1
        rank.fresh = False
        if rank.chunk == chunk.count:
            rank.chunk = 0
            rank.cursor = batch.sequence_number
        return actions + self._changes(rank, batch)

    def _changes(self, rank: _Rank, batch: KvEventBatch) -> list[Change]:
        changes: list[Change] = []
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "stored":
                if _is_prefix_group(event.stored):
                    rank.groups.add(event.stored.group_idx)
                    stored = _stored(event.stored)
                    if stored is not None:
                        self.block_size = stored.block_size
                        changes.append(stored)
            elif kind == "removed":
                removed = event.removed
                if not removed.HasField("group_idx") or removed.group_idx in rank.groups:
                    hashes = np.array(removed.block_hashes, np.int64)
                    changes.append(Removed(hashes, _tier(removed)))
            elif kind == "cleared":
                changes.append(Cleared())
        return changes


def _is_prefix_group(stored: KvBlocksStored) -> bool:
    # Groups with a window, and states of recurrent layers, drop blocks that
    # are still part of the prefix; full attention tells what can be reused.
    if stored.kv_cache_spec_sliding_window:
        return False
    kind = stored.kv_cache_spec_kind.lower()
    return not any(word in kind for word in ("sliding", "chunked", "mamba", "linear"))


def _tier(event: KvBlocksStored | KvBlocksRemoved) -> Tier | None:
    if event.HasField("tier") and event.tier in _TIERS:
        return _TIERS[event.tier]
    if event.HasField("medium"):
        return _MEDIA.get(event.medium.lower(), Tier.DISK)
    return None


def _stored(event: KvBlocksStored) -> Stored | None:
    """The run of full blocks that begins the event; None when there is none."""
    if not event.blocks:
        return None
    size = event.blocks[0].block_size or len(event.blocks[0].token_ids)
    hashes: list[int] = []
    tokens: list[int] = []
    for block in event.blocks:
        if len(block.token_ids) != size or size == 0:
            break
        hashes.append(block.block_hash)
        tokens.extend(block.token_ids)
    if not hashes:
        return None
    blocks = event.blocks[: len(hashes)]
    parent = event.parent_block_hash if event.HasField("parent_block_hash") else None
    lora, salt, known = _names(event, blocks[0], at_root=parent is None)
    return Stored(
        np.array(hashes, np.int64),
        parent,
        np.array(tokens, np.uint32),
        size,
        _extras(blocks, known),
        lora,
        salt,
        _tier(event) or Tier.DEVICE,
    )


def _names(event: KvBlocksStored, first: KvBlock, *, at_root: bool) -> tuple[str, str, set[str]]:
    """LoRA name, cache salt, and the texts among the extra keys that repeat them.

    They are fields of the event, or only texts among the extra keys: the
    adapter's in each block, then the salt's in the first block of a prompt.
    """
    texts = [extra.text for extra in first.extra_keys if extra.WhichOneof("key") == "text"]
    lora, salt = event.lora_name, event.cache_salt
    if not lora and first.lora_id and texts:
        lora = texts[0]
    rest = [text for text in texts if text != lora]
    if at_root and not salt and rest:
        salt = rest[0]
    return lora, salt, {lora, salt}


def _extras(blocks: Sequence[KvBlock], known: set[str]) -> BlockExtras | None:
    if not any(block.extra_keys for block in blocks):
        return None
    starts, digests, offsets = [0], [], []
    identifiers: list[str] = []
    for block in blocks:
        for extra in block.extra_keys:
            match extra.WhichOneof("key"):
                case "multimodal":
                    digests.append(identifier_digest(extra.multimodal.identifier))
                    offsets.append(extra.multimodal.offset)
                    identifiers.append(extra.multimodal.identifier)
                    continue
                case "text":
                    if extra.text in known:
                        continue
                    content: str | bytes = extra.text
                case "blob":
                    content = extra.blob
                case "number":
                    content = str(extra.number)
                case _:
                    continue
            # Something that no request of ours has: it must not match one.
            digests.append(identifier_digest(content))
            offsets.append(_NO_OFFSET)
            identifiers.append("")
        starts.append(len(digests))
    if not digests:
        return None
    return BlockExtras(
        np.array(starts, np.int64),
        np.array(digests, np.uint64),
        np.array(offsets, np.int64),
        tuple(identifiers),
    )
