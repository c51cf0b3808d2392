"""Where the prompt is cached already, if that is also where it starts soonest."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from router.fleet.pressure import Pressure
from router.policy.base import Candidate, Policy, RoutingView
from router.policy.settings import PolicySettings
from router.prefix.cost import Floats, Weights, lowest, seconds
from router.prefix.resident import Resident

# Prompt tokens per second of a worker of which nothing is known, nor of any other.
ORDINARY_RATE = 5000.0


class Prefix(Policy):
    """Chooses the lowest expected time to the first output, cached blocks counted as done.

    `resident` finds a worker's place in the index of its model, `pressure` its
    work at this moment.
    """

    name = "prefix"

    def __init__(
        self,
        settings: PolicySettings,
        resident: Callable[[Candidate], Resident | None],
        pressure: Callable[[Candidate], Pressure],
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._resident = resident
        self._pressure = pressure
        self._rng = rng
        # What the last choice found, for the charge that follows from it.
        self._found: tuple[RoutingView, dict[str, float]] | None = None

    def choose(self, view: RoutingView, candidates: Sequence[Candidate]) -> int:
        """See `Policy.choose`."""
        if len(candidates) == 1:
            return 0
        costs = self.costs(view, candidates)
        return lowest(costs, self._settings.temperature, self._rng)

    def costs(self, view: RoutingView, candidates: Sequence[Candidate]) -> Floats:
        """Weighted seconds for each candidate; infinite for those left out as silent."""
        settings = self._settings
        pressures = [self._pressure(candidate) for candidate in candidates]
        # A worker that was not measured yet is taken to be like the others.
        known = [p.rate for p in pressures if p.rate]
        ordinary = statistics.median(known) if known else ORDINARY_RATE
        matched = self._matched(view, candidates)
        addresses = (candidate.address for candidate in candidates)
        self._found = view, dict(zip(addresses, matched.tolist(), strict=True))
        costs = seconds(
            view.prompt_tokens,
            matched,
            np.array([p.wait(ordinary) for p in pressures]),
            np.array([p.rate or ordinary for p in pressures]),
            np.array([p.context_tokens for p in pressures], np.float64),
            Weights(
                self._credit(view),
                settings.prefill_weight,
                settings.wait_weight,
                settings.crowd_weight,
                settings.spill_wait,
            ),
        )
        silent = np.array([p.silence >= settings.silence_veto for p in pressures])
        if not silent.all():
            costs[silent] = np.inf
        return costs

    def charge(self, view: RoutingView, candidate: Candidate) -> int:
        """See `Policy.charge`: what is not cached there must be computed."""
        found, self._found = self._found, None
        if found is not None and found[0] is view and candidate.address in found[1]:
            matched = found[1][candidate.address]
        else:
            matched = float(self._matched(view, [candidate])[0])
        return max(1, view.prompt_tokens - int(matched))

    def reserved(self, view: RoutingView, candidate: Candidate) -> None:
        """See `Policy.reserved`: from now on the prompt's blocks are expected there."""
        resident = self._resident(candidate)
        if resident is None or view.blocks is None or not self._credit(view):
            return
        keys = view.blocks.keys(resident.block_size)
        resident.index.use(keys)
        settings = self._settings
        confirmed = resident.reporting and view.blocks.exact
        ttl = settings.event_bridge if confirmed else settings.approximate_ttl
        resident.expect(keys, ttl)

    def _credit(self, view: RoutingView) -> float:
        own = view.prefix_credit
        return self._settings.prefix_credit if own is None else own

    def _matched(self, view: RoutingView, candidates: Sequence[Candidate]) -> Floats:
        """Cached tokens of the prompt at each candidate, weighted by tier."""
        matched = np.zeros(len(candidates))
        if view.blocks is None or not self._credit(view):
            return matched
        # Workers of one model mostly agree in their block size: one walk.
        by_size: dict[int, list[tuple[int, Resident, list[int]]]] = {}
        for i, candidate in enumerate(candidates):
            resident = self._resident(candidate)
            if resident is not None:
                entry = (i, resident, resident.holders)
                by_size.setdefault(resident.block_size, []).append(entry)
        for size, asked in by_size.items():
            index = asked[0][1].index
            holders = [holder for _, _, held in asked for holder in held]
            weights = index.match(view.blocks.keys(size), holders).weights.tolist()
            for i, _, held in asked:
                matched[i] = size * max([weights[holder] for holder in held], default=0.0)
        return np.minimum(matched, view.prompt_tokens)
