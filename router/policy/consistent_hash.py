"""The same worker for the same key, unless it has too much to do."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from router.policy.base import Candidate, Opinion, Policy, RoutingView


class ConsistentHash(Policy):
    """Sticks to a worker by routing key, with bounded load.

    Each key ranks the workers by a hash of key and address (rendezvous
    hashing, Thaler and Ravishankar 1996), so a worker that comes or goes moves
    only its own keys. The first in the ranking whose expected wait is within
    `load_factor` times the mean is chosen (the bound of Mirrokni, Thorup and
    Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018), `slack`
    seconds being forgiven. Requests without a key go by `fallback`.
    """

    name = "consistent_hash"

    def __init__(self, load_factor: float, fallback: Policy, *, slack: float = 0.5) -> None:
        self._factor = load_factor
        self._fallback = fallback
        self._slack = slack

    def choose(self, view: RoutingView, candidates: Sequence[Candidate]) -> int:
        """See `Policy.choose`."""
        if not view.routing_key:
            return self._fallback.choose(view, candidates)
        waits = [candidate.expected_wait for candidate in candidates]
        bound = self._factor * sum(waits) / len(waits) + self._slack
        within = [i for i, wait in enumerate(waits) if wait <= bound]
        # Once, as a client's key may be of any length.
        key = xxhash.xxh64_intdigest(view.routing_key.encode())
        return max(within, key=lambda i: _rank(key, candidates[i].address))

    def opinions(self, view: RoutingView, candidates: Sequence[Candidate]) -> list[Opinion]:
        """See `Policy.opinions`."""
        return self._fallback.opinions(view, candidates)

    def reserved(self, view: RoutingView, candidate: Candidate) -> None:
        """See `Policy.reserved`."""
        self._fallback.reserved(view, candidate)


def _rank(key: int, address: str) -> int:
    return xxhash.xxh64_intdigest(address.encode(), seed=key)
