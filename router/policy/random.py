"""Any of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policy.base import Candidate, RoutingView


class Random:
    """Chooses uniformly."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, view: RoutingView, candidates: Sequence[Candidate]) -> int:
        """See `Policy.choose`."""
        return self._rng.randrange(len(candidates))

    def reserved(self, view: RoutingView, candidate: Candidate) -> None:
        """See `Policy.reserved`; nothing follows from a choice."""
