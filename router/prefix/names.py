"""By which identifiers workers know media that the router knows by reference."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.prefix.blocks import Tokens


@dataclass(frozen=True)
class NameLimits:
    """At most `entries`, with `runs` runs of equal placeholders in all and `runs_each` in one.

    `lifetime` is how many seconds an entry counts after it was last seen to be
    true: what is behind a URL may change.
    """

    entries: int = 1 << 16
    runs: int = 1 << 20
    runs_each: int = 1 << 11
    lifetime: float = 3600.0


@dataclass(frozen=True)
class Learned:
    """A worker's identifier of an item, and its placeholders as runs of equal tokens.

    `run_tokens` and `run_lengths` are uint32 [runs]; None where the item's end
    was not to be seen.
    """

    identifier: str
    run_tokens: npt.NDArray[np.uint32] | None = None
    run_lengths: npt.NDArray[np.uint32] | None = None

    @property
    def placeholders(self) -> Tokens | None:
        """The tokens of the item's placeholder range."""
        if self.run_tokens is None or self.run_lengths is None:
            return None
        return np.repeat(self.run_tokens, self.run_lengths)

    @property
    def runs(self) -> int:
        return 0 if self.run_tokens is None else len(self.run_tokens)

    def same_as(self, other: Learned | None) -> bool:
        """Whether both say the same."""
        if other is None or self.identifier != other.identifier:
            return False
        return np.array_equal(_bare(self.run_tokens), _bare(other.run_tokens)) and np.array_equal(
            _bare(self.run_lengths), _bare(other.run_lengths)
        )


def _bare(runs: npt.NDArray[np.uint32] | None) -> npt.NDArray[np.uint32]:
    return np.empty(0, np.uint32) if runs is None else runs


def learned(identifier: str, placeholders: Tokens | None, limits: NameLimits) -> Learned:
    """From the placeholders themselves, which are let go where they are too many runs."""
    if placeholders is None or not len(placeholders):
        return Learned(identifier)
    begins = np.flatnonzero(np.diff(placeholders, prepend=placeholders[0] ^ np.uint32(1)))
    if len(begins) > limits.runs_each:
        return Learned(identifier)
    lengths = np.diff(begins, append=len(placeholders)).astype(np.uint32)
    return Learned(identifier, placeholders[begins], lengths)


class Names:
    """Least recently used out first."""

    def __init__(self, limits: NameLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self._kept: OrderedDict[str, tuple[Learned, float]] = OrderedDict()
        self._runs = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, name: str) -> Learned | None:
        """What workers call the item that the router calls `name`."""
        kept = self._kept.get(name)
        if kept is None:
            return None
        if self._clock() >= kept[1]:
            self.forget(name)
            return None
        self._kept.move_to_end(name)
        return kept[0]

    def keep(self, name: str, entry: Learned) -> bool:
        """Whether this is news. What is no news counts as seen to be true again."""
        before = self.get(name)
        if before is not None and before.identifier == entry.identifier and not entry.runs:
            entry = before
        self.forget(name)
        self._kept[name] = entry, self._clock() + self.limits.lifetime
        self._runs += entry.runs
        while len(self._kept) > self.limits.entries or self._runs > self.limits.runs:
            self.forget(next(iter(self._kept)))
        return not entry.same_as(before)

    def forget(self, name: str) -> None:
        """It is not known any more."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._runs -= kept[0].runs
