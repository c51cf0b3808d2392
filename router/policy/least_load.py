"""The least loaded, of all or of two."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policy.base import Candidate, Opinion, Policy, RoutingView


class _ByLoad(Policy):
    def opinions(self, view: RoutingView, candidates: Sequence[Candidate]) -> list[Opinion]:
        """See `Policy.opinions`."""
        return [Opinion(cost=candidate.expected_wait) for candidate in candidates]


class LeastLoad(_ByLoad):
    """Chooses the shortest expected wait; ties are broken at random."""

    name = "least_load"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, view: RoutingView, candidates: Sequence[Candidate]) -> int:
        """See `Policy.choose`."""
        return _shortest(range(len(candidates)), candidates, self._rng)


class PowerOfTwo(_ByLoad):
    """Chooses the shorter expected wait of two different random candidates.

    Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing"
    (2001): nearly as even as asking all, without herding on one report.
    """

    name = "power_of_two"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, view: RoutingView, candidates: Sequence[Candidate]) -> int:
        """See `Policy.choose`."""
        if len(candidates) == 1:
            return 0
        return _shortest(self._rng.sample(range(len(candidates)), 2), candidates, self._rng)


def _shortest(positions: Sequence[int], candidates: Sequence[Candidate], rng: random.Random) -> int:
    waits = [candidates[i].expected_wait for i in positions]
    least = min(waits)
    return rng.choice([i for i, wait in zip(positions, waits, strict=True) if wait == least])
