"""Which holder has which block under which of its own hashes: compiled bookkeeping.

A holding is one (holder, engine hash) with its physical copies in each tier.
The holdings of a block form a list, and `bits` says for each block and tier
who holds it, so that one word answers for 64 holders.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from router.prefix import table
from router.prefix.table import OLDEST, SIZE

TIERS = 3
FREE, UNUSED, COUNT = range(3)


class Holdings(NamedTuple):
    """Lists hold holding + 1. `copies` is [holdings, tiers], `bits` [slots, tiers, words]."""

    buckets: npt.NDArray[np.int32]
    hashes: npt.NDArray[np.int64]
    holders: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    next: npt.NDArray[np.int32]
    copies: npt.NDArray[np.uint16]
    first: npt.NDArray[np.int32]
    bits: npt.NDArray[np.uint64]
    state: npt.NDArray[np.int64]


def make_holdings(slots: int, capacity: int, words: int) -> Holdings:
    """No holdings yet, of at most `capacity`, of `words` * 64 holders."""
    buckets = 1 << max(4, (capacity * 3 // 2).bit_length())
    return Holdings(
        np.zeros(buckets, np.int32),
        np.zeros(capacity, np.int64),
        np.zeros(capacity, np.int32),
        np.zeros(capacity, np.int32),
        np.zeros(capacity, np.int32),
        np.zeros((capacity, TIERS), np.uint16),
        np.zeros(slots, np.int32),
        np.zeros((slots, TIERS, words), np.uint64),
        np.zeros(3, np.int64),
    )


@njit(inline="always")
def _home(h: Any, holder: Any, engine_hash: Any) -> Any:
    # Engine hashes may be anything, small integers included: mix them
    # (the finaliser of MurmurHash3).
    x = np.uint64(engine_hash) ^ (np.uint64(holder + 1) * np.uint64(0x9E3779B97F4A7C15))
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return np.int64((x ^ (x >> np.uint64(33))) & np.uint64(len(h.buckets) - 1))


@njit(nogil=True, cache=True)
def find(h: Any, holder: Any, engine_hash: Any) -> Any:
    """The holding, or -1."""
    mask = len(h.buckets) - 1
    at = _home(h, holder, engine_hash)
    while True:
        entry = h.buckets[at]
        if entry == 0:
            return np.int64(-1)
        if h.hashes[entry - 1] == engine_hash and h.holders[entry - 1] == holder:
            return np.int64(entry - 1)
        at = (at + 1) & mask


@njit(nogil=True, cache=True)
def key_of(t: Any, h: Any, holder: int, engine_hash: int) -> Any:
    """The key of a block that the holder has, or 0."""
    holding = find(h, holder, engine_hash)
    return np.uint64(0) if holding < 0 else t.keys[h.slots[holding]]


@njit(nogil=True, cache=True)
def _refresh_bit(h: Any, slot: Any, holder: Any, tier: Any) -> None:
    word, bit = holder >> 6, np.uint64(1) << np.uint64(holder & 63)
    at = h.first[slot]
    while at:
        if h.holders[at - 1] == holder and h.copies[at - 1, tier]:
            h.bits[slot, tier, word] |= bit
            return
        at = h.next[at - 1]
    h.bits[slot, tier, word] &= ~bit


@njit(nogil=True, cache=True)
def _unbucket(h: Any, holding: Any) -> None:
    mask = len(h.buckets) - 1
    hole = _home(h, h.holders[holding], h.hashes[holding])
    while h.buckets[hole] != holding + 1:
        hole = (hole + 1) & mask
    at = hole
    while True:
        at = (at + 1) & mask
        entry = h.buckets[at]
        if entry == 0:
            break
        home = _home(h, h.holders[entry - 1], h.hashes[entry - 1])
        if ((at - home) & mask) >= ((at - hole) & mask):
            h.buckets[hole] = entry
            hole = at
    h.buckets[hole] = 0


@njit(nogil=True, cache=True)
def _free(h: Any, holding: Any) -> None:
    _unbucket(h, holding)
    for tier in range(TIERS):
        h.copies[holding, tier] = 0
    h.slots[holding] = -1
    h.next[holding] = h.state[FREE]
    h.state[FREE] = holding + 1
    h.state[COUNT] -= 1


@njit(nogil=True, cache=True)
def drop(t: Any, h: Any, holding: Any) -> None:
    """Forgets a holding, and its block when nobody else holds it."""
    slot, holder = h.slots[holding], h.holders[holding]
    at, before = h.first[slot], 0
    while at != holding + 1:
        before, at = at, h.next[at - 1]
    if before:
        h.next[before - 1] = h.next[holding]
    else:
        h.first[slot] = h.next[holding]
    _free(h, holding)
    if h.first[slot] == 0:
        h.bits[slot] = 0
        table.remove(t, slot)
    else:
        for tier in range(TIERS):
            _refresh_bit(h, slot, holder, tier)


@njit(nogil=True, cache=True)
def drop_block(t: Any, h: Any, slot: Any) -> None:
    """Forgets a block and everybody's holdings of it."""
    at = h.first[slot]
    while at:
        following = h.next[at - 1]
        _free(h, at - 1)
        at = following
    h.first[slot] = 0
    h.bits[slot] = 0
    table.remove(t, slot)


@njit(nogil=True, cache=True)
def store(
    t: Any, h: Any, holder: int, hashes: Any, keys: Any, parent: Any, tier: int, epoch: Any
) -> Any:
    """One more copy of each block of a run; returns how many blocks were evicted for it."""
    evicted = 0
    word, bit = holder >> 6, np.uint64(1) << np.uint64(holder & 63)
    table.touch_ancestors(t, parent, epoch)
    for i in range(len(hashes)):
        key = keys[i]
        holding = find(h, holder, hashes[i])
        if holding >= 0 and t.keys[h.slots[holding]] != key:
            # The engine uses the hash for other content now.
            drop(t, h, holding)
            holding = np.int64(-1)
        if holding < 0:
            if h.state[COUNT] == len(h.hashes):
                drop_block(t, h, t.state[OLDEST] - 1)
                evicted += 1
            slot = table.find(t, key)
            if slot < 0:
                if t.state[SIZE] == len(t.keys):
                    drop_block(t, h, t.state[OLDEST] - 1)
                    evicted += 1
                slot = table.insert(t, key, parent, epoch)
            free = h.state[FREE]
            if free:
                holding = np.int64(free - 1)
                h.state[FREE] = h.next[holding]
            else:
                holding = h.state[UNUSED]
                h.state[UNUSED] += 1
            h.state[COUNT] += 1
            h.hashes[holding] = hashes[i]
            h.holders[holding] = holder
            h.slots[holding] = slot
            h.next[holding] = h.first[slot]
            h.first[slot] = holding + 1
            at = _home(h, holder, hashes[i])
            while h.buckets[at]:
                at = (at + 1) & (len(h.buckets) - 1)
            h.buckets[at] = holding + 1
        slot = h.slots[holding]
        table.touch(t, slot, epoch)
        if h.copies[holding, tier] < 65535:
            h.copies[holding, tier] += 1
        h.bits[slot, tier, word] |= bit
        parent = key
    return evicted


@njit(nogil=True, cache=True)
def take(t: Any, h: Any, holder: int, hashes: Any, tier: int, gone: Any) -> Any:
    """One copy less of each block in a tier, or in the best that has one if tier is -1.

    Writes the keys of blocks that the holder has no more into `gone`
    (uint64 [n]) and returns their number. Unknown hashes change nothing.
    """
    n = 0
    for i in range(len(hashes)):
        holding = find(h, holder, hashes[i])
        if holding < 0:
            continue
        slot, chosen = h.slots[holding], tier
        if chosen < 0 or h.copies[holding, chosen] == 0:
            chosen = 0
            while h.copies[holding, chosen] == 0:
                chosen += 1
            if tier >= 0 and chosen != tier:
                # Nothing in that tier: a removal that was counted already.
                continue
        h.copies[holding, chosen] -= 1
        left = 0
        for other in range(TIERS):
            left += h.copies[holding, other]
        if left == 0:
            gone[n] = t.keys[slot]
            n += 1
            drop(t, h, holding)
        elif h.copies[holding, chosen] == 0:
            _refresh_bit(h, slot, holder, chosen)
    return n


@njit(nogil=True, cache=True)
def leave(t: Any, h: Any, holder: int) -> None:
    """Forgets everything that a holder has."""
    for holding in range(h.state[UNUSED]):
        if h.slots[holding] >= 0 and h.holders[holding] == holder and _counted(h, holding):
            drop(t, h, holding)


@njit(inline="always")
def _counted(h: Any, holding: Any) -> Any:
    return h.copies[holding, 0] or h.copies[holding, 1] or h.copies[holding, 2]
