"""Ways to choose that the router's own are compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from router.fleet.pressure import Pressure
from router.policy.base import Candidate, RoutingView
from router.policy.prefix import Prefix
from router.policy.settings import PolicySettings
from router.prefix.cost import Floats
from router.prefix.resident import Resident


class LongestPrefix(Prefix):
    """Whoever has most of the prompt, whatever its load."""

    name = "longest prefix"

    def costs(self, view: RoutingView, candidates: Sequence[Candidate]) -> Floats:
        return -self._matched(view, candidates)


class PublishedCost(Prefix):
    """Dynamo's published form: blocks to prefill there, plus blocks decoding there."""

    name = "published cost"

    def __init__(
        self,
        settings: PolicySettings,
        resident: Callable[[Candidate], Resident | None],
        pressure: Callable[[Candidate], Pressure],
        rng: random.Random,
        *,
        block_size: int,
        scale: float = 1.0,
    ) -> None:
        super().__init__(settings, resident, pressure, rng)
        self._block = block_size
        self._scale = scale

    def costs(self, view: RoutingView, candidates: Sequence[Candidate]) -> Floats:
        pressures = [self._pressure(candidate) for candidate in candidates]
        active = np.array([p.queued for p in pressures])
        decoding = np.array([p.context_tokens for p in pressures]) / self._block
        matched = self._matched(view, candidates) / self._block
        prefill = np.maximum(0.0, (active + view.prompt_tokens) / self._block - matched)
        return np.asarray(self._scale * prefill + decoding)
