"""Who holds which block: the index of one model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from router.prefix import holdings
from router.prefix.approximate import ApproximateIndex
from router.prefix.blocks import NO_KEY, PROCESS_SEED, Keys, root_key, run_keys
from router.prefix.changes import Change, Cleared, Lost, Removed, Stored, Tier
from router.prefix.match import Match, touch_chain, walk
from router.prefix.table import SIZE, make_slots

# Operations that count as one moment to the LRU order.
_EPOCH = 4096


@dataclass(frozen=True)
class IndexSettings:
    """Bounds and weights of an index.

    blocks: blocks whose holders are known, before the least recently used go.
    holdings_per_block: (holder, block) pairs kept for each of them, on average.
    expected_blocks: blocks known from our own decisions only.
    host_weight, disk_weight: worth of a block that must be brought to the
        device first, against one that is there.
    """

    blocks: int = 1 << 20
    holdings_per_block: float = 2.0
    expected_blocks: int = 1 << 18
    host_weight: float = 0.75
    disk_weight: float = 0.25


@dataclass(frozen=True)
class Chain:
    """The keys of a run of blocks (uint64 [n]), and that of the block before, or `NO_KEY`."""

    parent: int
    keys: Keys


class PrefixIndex:
    """Holders, their blocks as they report them, and what is expected of them.

    A holder is one rank of one generation of a worker, under a small number
    that is used again after it left. Calls come from one thread.
    """

    def __init__(
        self,
        settings: IndexSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        seed: int = PROCESS_SEED,
    ) -> None:
        self.settings = settings or IndexSettings()
        self._seed = seed
        self._words = 1
        self._slots = make_slots(self.settings.blocks)
        self._holdings = holdings.make_holdings(
            self.settings.blocks,
            int(self.settings.blocks * self.settings.holdings_per_block),
            self._words,
        )
        self._expected = ApproximateIndex(self.settings.expected_blocks, clock=clock)
        self._losses = np.array([0.0, 1 - self.settings.host_weight, 1 - self.settings.disk_weight])
        self._present: set[int] = set()
        self._operations = _EPOCH
        self.evicted = 0
        self.orphans = 0

    @property
    def blocks(self) -> int:
        """Different blocks that somebody reports to hold."""
        return int(self._slots.state[SIZE])

    @property
    def held(self) -> int:
        """(Holder, block) pairs reported."""
        return int(self._holdings.state[holdings.COUNT])

    @property
    def expected(self) -> int:
        """Different blocks that somebody is expected to hold."""
        return len(self._expected)

    # -- Holders

    def join(self) -> int:
        """The number of a new holder, which has nothing."""
        holder = next(n for n in range(len(self._present) + 1) if n not in self._present)
        if holder >= self._words * 64:
            self._widen()
        self._present.add(holder)
        return holder

    def leave(self, holder: int) -> None:
        """The holder is gone, and what it had with it."""
        self.clear(holder)
        self._present.discard(holder)

    def clear(self, holder: int) -> None:
        """The holder has nothing, and nothing is expected of it."""
        holdings.leave(self._slots, self._holdings, holder)
        self._expected.leave(holder)

    def _widen(self) -> None:
        old = self._holdings.bits
        self._words *= 2
        bits = np.zeros((*old.shape[:2], self._words), np.uint64)
        used = int(self._slots.state[holdings.UNUSED + 1])
        bits[:used, :, : old.shape[2]] = old[:used]
        self._holdings = self._holdings._replace(bits=bits)
        self._expected.widen(self._words * 64)

    # -- What holders report and what we expect

    def apply(self, holder: int, change: Change) -> Chain | None:
        """One change of a holder's cache; returns the keys of what was stored, if anything was."""
        match change:
            case Stored():
                return self._store(holder, change)
            case Removed(hashes=hashes, tier=tier):
                gone = np.empty(len(hashes), np.uint64)
                n = holdings.take(
                    self._slots, self._holdings, holder, hashes, -1 if tier is None else tier, gone
                )
                self._expected.forget(holder, gone[:n])
            case Cleared():
                self.clear(holder)
            case Lost():
                # Our own decisions were made all the same.
                holdings.leave(self._slots, self._holdings, holder)
        return None

    def _store(self, holder: int, stored: Stored) -> Chain | None:
        if stored.parent is None:
            parent = root_key(
                stored.block_size, lora=stored.lora, salt=stored.salt, seed=self._seed
            )
        else:
            parent = int(holdings.key_of(self._slots, self._holdings, holder, stored.parent))
            if parent == NO_KEY:
                # Its beginning was stored before we listened, or evicted here.
                self.orphans += len(stored.hashes)
                return None
        keys = run_keys(stored.tokens, stored.block_size, parent, stored.extras)
        before = NO_KEY if stored.parent is None else parent
        self.store_keys(holder, stored.hashes, keys, before, stored.tier)
        return Chain(before, keys)

    def store_keys(
        self,
        holder: int,
        hashes: np.ndarray[tuple[int], np.dtype[np.int64]],
        keys: Keys,
        parent: int = NO_KEY,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        """One more copy of each block of a run whose keys are known."""
        self._operations += 1
        self.evicted += holdings.store(
            self._slots,
            self._holdings,
            holder,
            hashes,
            keys,
            np.uint64(parent),
            int(tier),
            np.uint32(self._operations // _EPOCH),
        )

    def expect(self, holder: int, keys: Keys, ttl: float) -> None:
        """A request with these blocks goes to the holder, which will have them for `ttl` s."""
        self._expected.expect(holder, keys, ttl)

    # -- Asking

    def match(self, keys: Keys, holders: Iterable[int]) -> Match:
        """How much of a prompt each of the holders has; 0 for holders not asked for."""
        mask = 0
        for holder in holders:
            mask |= 1 << holder
        active = np.array(np.frombuffer(mask.to_bytes(8 * self._words, "little"), "<u8"))
        blocks = np.zeros(self._words * 64, np.int32)
        losses = np.zeros(self._words * 64)
        walk(
            self._slots,
            self._holdings.bits,
            self._expected.arrays,
            keys,
            self._expected.now(),
            self._losses,
            active,
            blocks,
            losses,
        )
        return Match(blocks, blocks - losses)

    def use(self, keys: Keys) -> None:
        """A request with these blocks comes: they are the last to be evicted."""
        self._operations += 1
        touch_chain(self._slots, keys, np.uint32(self._operations // _EPOCH))
