"""What workers should hold by our own decisions: blocks we sent there, for a while.

For workers without events it is all there is to know. For the others it
bridges the time until the event arrives, so that a burst of requests with one
prefix goes to one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from router.prefix import table
from router.prefix.blocks import Keys
from router.prefix.table import OLDEST, SIZE, Slots, make_slots

# Times in the table are int32 ticks since its start.
TICK = 0.1
# Some seven years; whoever wants to believe for longer gets that.
_LAST = int(np.iinfo(np.int32).max)


class Expectations(NamedTuple):
    """`expiry` is [slots, holders] and `latest` [slots], in ticks; 0 is never."""

    slots: Slots
    expiry: npt.NDArray[np.int32]
    latest: npt.NDArray[np.int32]


class ApproximateIndex:
    """At most `capacity` blocks, the least recently expected given up first."""

    def __init__(self, capacity: int, *, clock: Callable[[], float], holders: int = 64) -> None:
        self._clock = clock
        self._start = clock()
        self.arrays = Expectations(
            make_slots(capacity),
            np.zeros((capacity, holders), np.int32),
            np.zeros(capacity, np.int32),
        )

    def __len__(self) -> int:
        return int(self.arrays.slots.state[SIZE])

    def now(self) -> int:
        """The present in ticks, at least 1."""
        return 1 + int((self._clock() - self._start) / TICK)

    def widen(self, holders: int) -> None:
        """Makes room for more holders."""
        old = self.arrays.expiry
        wide = np.zeros((old.shape[0], holders), np.int32)
        used = int(self.arrays.slots.state[table.UNUSED])
        wide[:used, : old.shape[1]] = old[:used]
        self.arrays = self.arrays._replace(expiry=wide)

    def expect(self, holder: int, keys: Keys, ttl: float) -> None:
        """The holder will have this chain of blocks, and is believed to for `ttl` seconds.

        Repeating it starts the time anew.
        """
        now = self.now()
        until = min(now + max(1, int(ttl / TICK)), _LAST)
        _expect(self.arrays, holder, keys, now, until)

    def forget(self, holder: int, keys: Keys) -> None:
        """The holder has these no more, whatever was expected."""
        _forget(self.arrays, holder, keys)

    def leave(self, holder: int) -> None:
        """Nothing is expected of this holder any more."""
        self.arrays.expiry[: self.arrays.slots.state[table.UNUSED], holder] = 0


@njit(nogil=True, cache=True)
def _remove(a: Any, slot: Any) -> None:
    a.expiry[slot] = 0
    a.latest[slot] = 0
    table.remove(a.slots, slot)


@njit(nogil=True, cache=True)
def _expect(a: Any, holder: int, keys: Any, now: int, until: int) -> None:
    t = a.slots
    # The list is in order of use, so what has expired is at its end. Twice as
    # many go as may come: the table empties again after a burst.
    for _ in range(2 * len(keys)):
        if t.state[SIZE] == 0 or a.latest[t.state[OLDEST] - 1] > now:
            break
        _remove(a, t.state[OLDEST] - 1)
    # Of a chain that does not fit, the beginning is kept.
    kept = min(len(keys), len(t.keys))
    crowded = t.state[SIZE] + kept > len(t.keys)
    slots = np.empty(kept, np.int64)
    parent = np.uint64(0)
    for i in range(kept):
        slot = table.find(t, keys[i])
        if slot < 0:
            if t.state[SIZE] == len(t.keys):
                _remove(a, t.state[OLDEST] - 1)
            slot = table.insert(t, keys[i], parent, np.uint32(0))
        elif crowded:
            # Out of the way of what the rest of the chain pushes out.
            table.touch(t, slot, np.uint32(0))
        if a.expiry[slot, holder] < until:
            a.expiry[slot, holder] = until
        if a.latest[slot] < until:
            a.latest[slot] = until
        slots[i] = slot
        parent = keys[i]
    # Leaves are given up before their parents.
    for i in range(kept - 1, -1, -1):
        table.touch(t, slots[i], np.uint32(0))


@njit(nogil=True, cache=True)
def _forget(a: Any, holder: int, keys: Any) -> None:
    for key in keys:
        slot = table.find(a.slots, key)
        if slot >= 0:
            a.expiry[slot, holder] = 0
