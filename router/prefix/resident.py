"""One generation of a worker as the index knows it."""

from __future__ import annotations

from router.prefix.blocks import Keys
from router.prefix.changes import Change, Lost, Stored
from router.prefix.index import PrefixIndex
from router.prefix.learn import Learner, Listener, References, Watch


class Resident:
    """A worker's ranks in the index of its model, and how it names its blocks.

    `block_size` (tokens) is what the worker says until its events show it.
    `reporting` is whether its events come in now; without them our own
    decisions are all there is. Gone workers leave, and their successors at
    the same address are other residents. What its events tell of media goes to
    `learner`.
    """

    def __init__(self, index: PrefixIndex, block_size: int, learner: Learner | None = None) -> None:
        self.index = index
        self.block_size = block_size
        self.reporting = False
        self._listener = Listener(learner) if learner is not None else None
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
        chain = self.index.apply(self._holder(rank), change)
        if self._listener is None:
            return
        if isinstance(change, Stored) and chain is not None:
            self._listener.hear(change, chain)
        elif isinstance(change, Lost):
            self._listener.lose()

    def fall_silent(self) -> None:
        """Its events do not come in any more; what was reported is kept."""
        self.reporting = False
        if self._listener is not None:
            self._listener.lose()

    def watch(self, references: References) -> Watch | None:
        """A request with these references goes there; None where nothing can be learned of it."""
        if self._listener is None or not self.reporting or self._gone:
            return None
        return self._listener.watch(references)

    def expect(self, keys: Keys, ttl: float) -> None:
        """A request with these blocks goes there; which rank takes it the worker decides."""
        if not self._gone:
            for holder in self.holders:
                self.index.expect(holder, keys, ttl)

    def leave(self) -> None:
        """The worker is gone: its blocks go too."""
        self._gone = True
        if self._listener is not None:
            self._listener.lose()
        for holder in self._holders.values():
            self.index.leave(holder)
        self._holders.clear()
