"""One generation of a worker as the index knows it."""

from __future__ import annotations

from router.prefix.blocks import Keys
from router.prefix.changes import Change, Stored
from router.prefix.index import PrefixIndex


class Resident:
    """A worker's ranks in the index of its model, and how it names its blocks.

    `block_size` (tokens) is what the worker says until its events show it.
    `reporting` is whether its events come in now; without them our own
    decisions are all there is. Gone workers leave, and their successors at
    the same address are other residents.
    """

    def __init__(self, index: PrefixIndex, block_size: int) -> None:
        self.index = index
        self.block_size = block_size
        self.reporting = False
        self._holders: dict[int, int] = {}
        self._gone = False

    @property
    def holders(self) -> list[int]:
        """Its numbers in the index, one a rank; none once it is gone."""
        if not self._holders and not self._gone:
            self._holder(0)
        return list(self._holders.values())

    def _holder(self, rank: int) -> int:
        if rank not in self._holders:
            self._holders[rank] = self.index.join()
        return self._holders[rank]

    def apply(self, rank: int, change: Change) -> None:
        """A change that one of its ranks reported."""
        if self._gone:
            return
        if isinstance(change, Stored):
            self.block_size = change.block_size
        self.index.apply(self._holder(rank), change)

    def expect(self, keys: Keys, ttl: float) -> None:
        """A request with these blocks goes there; which rank takes it the worker decides."""
        if not self._gone:
            for holder in self.holders:
                self.index.expect(holder, keys, ttl)

    def leave(self) -> None:
        """The worker is gone: its blocks go too."""
        self._gone = True
        for holder in self._holders.values():
            self.index.leave(holder)
        self._holders.clear()
