"""Each in its turn."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.base import Candidate, Policy, RoutingView

_REMEMBERED = 4096


class RoundRobin(Policy):
    """Chooses the candidate that has waited longest for a turn.

    Turns are kept by address, not by position, so a worker that joins, leaves
    or is excluded for one request does not shift the turns of the others.
    """

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0
        self._last_turns: dict[str, int] = {}

    def choose(self, view: RoutingView, candidates: Sequence[Candidate]) -> int:
        """See `Policy.choose`."""
        return min(
            range(len(candidates)),
            key=lambda i: self._last_turns.get(candidates[i].address, 0),
        )

    def reserved(self, view: RoutingView, candidate: Candidate) -> None:
        """See `Policy.reserved`."""
        self._turn += 1
        # Moved to the end, so that the oldest turns come first.
        self._last_turns.pop(candidate.address, None)
        self._last_turns[candidate.address] = self._turn
        if len(self._last_turns) > _REMEMBERED:
            # Addresses of long gone workers must not pile up.
            del self._last_turns[next(iter(self._last_turns))]
