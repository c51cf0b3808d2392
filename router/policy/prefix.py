"""Where the prompt is cached already, if that is also where it starts soonest."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from router.fleet.pressure import Pressure
from router.policy.base import Candidate, Opinion, Policy, RoutingView
from router.policy.settings import PolicySettings
from router.prefix.cost import Floats, Weights, lowest, seconds
from router.prefix.resident import Resident

# Prompt tokens per second of a worker of which nothing is known, nor of any other.
ORDINARY_RATE = 5000.0


class Prefix(Policy):
    """Chooses the lowest expected time to the first output, cached blocks counted as done.

    `resident` finds a worker's place in the index of its model, `pressure` its
    work at this moment. `on_choice` hears of each choice how many blocks the
    prompt has, and how many of them the chosen one was believed to hold.
    """

    name = "prefix"

    def __init__(
        self,
        settings: PolicySettings,
        resident: Callable[[Candidate], Resident | None],
        pressure: Callable[[Candidate], Pressure],
        rng: random.Random,
        on_choice: Callable[[int, float], None] = lambda asked, matched: None,
    ) -> None:
        self._settings = settings
        self._resident = resident
        self._pressure = pressure
        self._rng = rng
        self._on_choice = on_choice
        # What the last choice found, for what follows from it.
        self._found: tuple[RoutingView, dict[str, float]] | None = None

    def choose(self, view: RoutingView, candidates: Sequence[Candidate]) -> int:
        """See `Policy.choose`."""
        if len(candidates) == 1:
            return 0
        costs = self.costs(view, candidates)
        return lowest(costs, self._settings.prefix_temperature, self._rng)

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
        return max(1, view.prompt_tokens - int(self._found_at(view, candidate)))

    def opinions(self, view: RoutingView, candidates: Sequence[Candidate]) -> list[Opinion]:
        """See `Policy.opinions`."""
        costs = self.costs(view, candidates).tolist()
        if view.blocks is None or not self._credit(view):
            return [Opinion(cost=cost) for cost in costs]
        return [
            Opinion(cost, int(self._found_at(view, one) / self._block_size(one)))
            for one, cost in zip(candidates, costs, strict=True)
        ]

    def reserved(self, view: RoutingView, candidate: Candidate) -> None:
        """See `Policy.reserved`: from now on the prompt's blocks are expected there."""
        resident = self._resident(candidate)
        if resident is None or view.blocks is None or not self._credit(view):
            return
        keys = view.blocks.keys(resident.block_size)
        self._on_choice(len(keys), self._found_at(view, candidate) / resident.block_size)
        self._found = None
        resident.index.use(keys)
        settings = self._settings
        confirmed = resident.reporting and view.blocks.exact
        ttl = settings.event_bridge if confirmed else settings.approximate_ttl
        resident.expect(keys, ttl)

    def _found_at(self, view: RoutingView, candidate: Candidate) -> float:
        """Cached tokens of the prompt there, as the last choice found them."""
        if self._found is None or self._found[0] is not view:
            self._found = view, {}
        found = self._found[1]
        if candidate.address not in found:
            found[candidate.address] = float(self._matched(view, [candidate])[0])
        return found[candidate.address]

    def _block_size(self, candidate: Candidate) -> int:
        resident = self._resident(candidate)
        return resident.block_size if resident is not None else 1

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
