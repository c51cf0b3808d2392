"""Any of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policy.base import Candidate, Policy, RoutingView


class Random(Policy):
    """Chooses uniformly."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, view: RoutingView, candidates: Sequence[Candidate]) -> int:
        """See `Policy.choose`."""
        return self._rng.randrange(len(candidates))
