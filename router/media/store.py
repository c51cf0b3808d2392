"""One store of values that are expensive to make again, counted and capped in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(slots=True)
class Counters:
    """What one door of the store has seen; counters only grow."""

    hits: int = 0
    misses: int = 0
    # Found, but only good after the host confirmed it.
    revalidated: int = 0


@dataclass(frozen=True, slots=True)
class _Entry(Generic[V]):
    value: V
    size: int


class Store(Generic[V]):
    """Least recently used first out. All methods run on the event loop's thread.

    `size` is what the caller says a value keeps in memory outside the Python
    heap as well: the length of bytes, `nbytes` of arrays. A store of 0 bytes
    keeps nothing, which switches reuse off.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, _Entry[V]] = OrderedDict()
        self.nbytes = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def enabled(self) -> bool:
        """Whether anything is ever kept."""
        return self._max_bytes > 0

    def get(self, key: Hashable) -> V | None:
        """The value, now the most recently used; None where there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: Hashable, value: V, size: int) -> None:
        """Keeps a value; drops the least recently used until it fits. Too large is not kept."""
        self.discard(key)
        if size > self._max_bytes or not self.enabled:
            return
        self._entries[key] = _Entry(value, size)
        self.nbytes += size
        while self.nbytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.nbytes -= dropped.size
            self.evictions += 1

    def discard(self, key: Hashable) -> None:
        """Forgets a value, if it is there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.size

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self.nbytes = 0
