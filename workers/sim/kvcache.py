"""The KV cache in blocks: which are held, which can be found again, which must go.

Pure bookkeeping. What changed is returned to the caller as `Stored` and
`Removed`, in the order it happened.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash


@dataclass(frozen=True)
class Placed:
    """A media item in the prompt: its identity and the tokens it covers."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True)
class ExtraKey:
    """A media item that overlaps a block; `offset` counts from the block's first token."""

    identifier: str
    offset: int


@dataclass(frozen=True)
class Stored:
    block_hash: int
    parent: int | None
    token_ids: tuple[int, ...]
    extra: tuple[ExtraKey, ...]


@dataclass(frozen=True)
class Removed:
    block_hashes: tuple[int, ...]


@dataclass
class Holding:
    """The blocks of one running request: `hashes` can be shared, `private` cannot yet."""

    hashes: list[int]
    private: int
    # Where the chain of full blocks ends; None before the first block.
    tail: int | None
    cached_blocks: int


@dataclass
class _Block:
    holders: int = 0


@dataclass
class KvCache:
    """At most `capacity` blocks of `block_size` tokens.

    Blocks that no request holds stay until their room is needed, least
    recently used first and children before their parents.
    """

    capacity: int
    block_size: int
    # Makes this worker's hashes differ from every other's: they are opaque.
    salt: int = 0
    sharing: bool = True
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _private: int = 0

    @property
    def used(self) -> int:
        """Blocks in use, those included that could be given up at once."""
        return len(self._blocks) + self._private

    @property
    def held(self) -> int:
        """Blocks that running requests hold."""
        return self.used - len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def chain(
        self,
        ids: np.ndarray,
        placed: Sequence[Placed] = (),
        parent: int | None = None,
        first: int = 0,
    ) -> list[Stored]:
        """The full blocks of `ids` (uint32 [n]) from token `first` on, each bound to its parent.

        A block's hash covers its parent, its tokens, and every media item that
        overlaps it with the item's offset relative to the block.
        """
        size = self.block_size
        chained = []
        for start in range(first, len(ids) - size + 1, size):
            tokens = ids[start : start + size]
            extra = tuple(
                ExtraKey(item.identifier, item.offset - start)
                for item in placed
                if item.offset < start + size and item.offset + item.length > start
            )
            hasher = xxhash.xxh3_64(seed=self.salt)
            hasher.update(struct.pack("<q?", parent or 0, parent is None))
            hasher.update(np.ascontiguousarray(tokens, dtype="<u4").tobytes())
            for key in extra:
                hasher.update(struct.pack("<qI", key.offset, len(key.identifier)))
                hasher.update(key.identifier.encode())
            block_hash = hasher.intdigest() - (1 << 63)
            chained.append(Stored(block_hash, parent, tuple(tokens.tolist()), extra))
            parent = block_hash
        return chained

    def match(self, chained: Sequence[Stored], prompt_tokens: int) -> int:
        """How many leading blocks are cached.

        The last prompt token is always computed, so a prompt of whole blocks
        never matches with its last one.
        """
        if not self.sharing:
            return 0
        most = min(len(chained), max(prompt_tokens - 1, 0) // self.block_size)
        for count in range(most):
            if chained[count].block_hash not in self._blocks:
                return count
        return most

    def fits(self, chained: Sequence[Stored], prompt_tokens: int, total_tokens: int) -> bool:
        """Whether a request of `total_tokens` can be held beside those that are held now.

        One that is larger than the whole cache is let in when it is alone.
        """
        if not self.held:
            return True
        matched = self.match(chained, prompt_tokens)
        waking = sum(1 for block in chained[:matched] if block.block_hash in self._idle)
        need = self.blocks_for(total_tokens) - matched + waking
        return self.held + need <= self.capacity

    def hold(
        self, chained: Sequence[Stored], prompt_tokens: int, total_tokens: int
    ) -> tuple[Holding, list[Removed]]:
        """Takes the room for one request; its matched blocks can no longer be given up."""
        matched = self.match(chained, prompt_tokens)
        hashes = [block.block_hash for block in chained[:matched]]
        for block_hash in hashes:
            self._blocks[block_hash].holders += 1
            self._idle.pop(block_hash, None)
        private = max(self.blocks_for(total_tokens) - matched, 0)
        self._private += private
        evicted = []
        while self.used > self.capacity and self._idle:
            block_hash, _ = self._idle.popitem(last=False)
            del self._blocks[block_hash]
            evicted.append(block_hash)
        removed = [Removed(tuple(evicted))] if evicted else []
        return Holding(hashes, private, hashes[-1] if hashes else None, matched), removed

    def store(self, holding: Holding, blocks: Sequence[Stored]) -> list[Stored]:
        """Makes computed blocks findable; returns those that were not before."""
        fresh = []
        for block in blocks:
            holding.tail = block.block_hash
            if not self.sharing or block.block_hash in self._blocks or holding.private == 0:
                continue
            holding.private -= 1
            self._private -= 1
            self._blocks[block.block_hash] = _Block(holders=1)
            holding.hashes.append(block.block_hash)
            fresh.append(block)
        return fresh

    def release(self, holding: Holding) -> None:
        """Lets go of a request's blocks; the shared ones stay until room is needed."""
        self._private -= holding.private
        holding.private = 0
        # The last block first, so that chains are given up from their end.
        for block_hash in reversed(holding.hashes):
            block = self._blocks.get(block_hash)
            if block is None:
                continue
            block.holders -= 1
            if block.holders == 0:
                self._idle[block_hash] = None
        holding.hashes.clear()

    def clear(self) -> bool:
        """Forgets every block; False, and nothing done, while requests hold some."""
        if self.held:
            return False
        self._blocks.clear()
        self._idle.clear()
        return True
