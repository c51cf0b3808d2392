"""A bounded map from block key to slot, with the least recently used at hand.

Plain functions over arrays, compiled without the GIL, so that other compiled
passes can walk the table without a call into Python for each block. Open
addressing with linear probing and backward shift deletion; keys are hashes
already. Memory is asked for zeroed and touched only as it fills.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

# Places in `Slots.state`. Lists hold slot + 1, so that zeroed memory is empty.
SIZE, FREE, UNUSED, NEWEST, OLDEST = range(5)


class Slots(NamedTuple):
    """The table. `capacity` slots; `buckets` is a power of two above it.

    `parents` are keys, not slots: a parent may go and its slot be reused
    while its children stay.
    """

    buckets: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint64]
    parents: npt.NDArray[np.uint64]
    newer: npt.NDArray[np.int32]
    older: npt.NDArray[np.int32]
    epochs: npt.NDArray[np.uint32]
    state: npt.NDArray[np.int64]


def make_slots(capacity: int) -> Slots:
    """An empty table of at most `capacity` keys."""
    buckets = 1 << max(4, (capacity * 3 // 2).bit_length())
    return Slots(
        np.zeros(buckets, np.int32),
        np.zeros(capacity, np.uint64),
        np.zeros(capacity, np.uint64),
        np.zeros(capacity, np.int32),
        np.zeros(capacity, np.int32),
        np.zeros(capacity, np.uint32),
        np.zeros(5, np.int64),
    )


@njit(nogil=True, cache=True)
def find(t: Any, key: Any) -> Any:
    """The slot of a key, or -1."""
    mask = np.int64(len(t.buckets) - 1)
    at = np.int64(key & np.uint64(mask))
    while True:
        entry = t.buckets[at]
        if entry == 0:
            return np.int64(-1)
        if t.keys[entry - 1] == key:
            return np.int64(entry - 1)
        at = (at + 1) & mask


@njit(nogil=True, cache=True)
def _unlink(t: Any, slot: Any) -> None:
    newer, older = t.newer[slot], t.older[slot]
    if newer:
        t.older[newer - 1] = older
    else:
        t.state[NEWEST] = older
    if older:
        t.newer[older - 1] = newer
    else:
        t.state[OLDEST] = newer


@njit(nogil=True, cache=True)
def _link(t: Any, slot: Any) -> None:
    newest = t.state[NEWEST]
    t.newer[slot] = 0
    t.older[slot] = newest
    if newest:
        t.newer[newest - 1] = slot + 1
    else:
        t.state[OLDEST] = slot + 1
    t.state[NEWEST] = slot + 1


@njit(nogil=True, cache=True)
def touch(t: Any, slot: Any, epoch: Any) -> None:
    """Makes a slot the most recently used."""
    t.epochs[slot] = epoch
    if t.state[NEWEST] != slot + 1:
        _unlink(t, slot)
        _link(t, slot)


@njit(nogil=True, cache=True)
def touch_ancestors(t: Any, key: Any, epoch: Any) -> None:
    """Touches a key and its ancestors up to the first that this epoch has seen.

    So no branch outlives its root: what is reached through an ancestor keeps
    the ancestor recent, at a cost shared by all the touches of an epoch.
    """
    while key != np.uint64(0):
        slot = find(t, key)
        if slot < 0 or t.epochs[slot] == epoch:
            return
        touch(t, slot, epoch)
        key = t.parents[slot]


@njit(nogil=True, cache=True)
def insert(t: Any, key: Any, parent: Any, epoch: Any) -> Any:
    """A slot for a key that is not in the table, which must not be full."""
    free = t.state[FREE]
    if free:
        slot = np.int64(free - 1)
        t.state[FREE] = t.older[slot]
    else:
        slot = t.state[UNUSED]
        t.state[UNUSED] += 1
    t.keys[slot] = key
    t.parents[slot] = parent
    t.epochs[slot] = epoch
    mask = np.int64(len(t.buckets) - 1)
    at = np.int64(key & np.uint64(mask))
    while t.buckets[at]:
        at = (at + 1) & mask
    t.buckets[at] = slot + 1
    _link(t, slot)
    t.state[SIZE] += 1
    return slot


@njit(nogil=True, cache=True)
def remove(t: Any, slot: Any) -> None:
    """Frees a slot."""
    mask = np.int64(len(t.buckets) - 1)
    hole = np.int64(t.keys[slot] & np.uint64(mask))
    while t.buckets[hole] != slot + 1:
        hole = (hole + 1) & mask
    at = hole
    while True:
        at = (at + 1) & mask
        entry = t.buckets[at]
        if entry == 0:
            break
        home = np.int64(t.keys[entry - 1] & np.uint64(mask))
        # The entry may fill the hole unless its home lies after the hole.
        if ((at - home) & mask) >= ((at - hole) & mask):
            t.buckets[hole] = entry
            hole = at
    t.buckets[hole] = 0
    _unlink(t, slot)
    t.older[slot] = t.state[FREE]
    t.state[FREE] = slot + 1
    t.state[SIZE] -= 1
