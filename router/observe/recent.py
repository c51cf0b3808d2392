"""The errors of the last while, for people: each kind once, with how often and when."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_LONGEST = 200


@dataclass
class Failure:
    """One kind of failure. `last_at` is in seconds of the clock, the rest that of the last one."""

    model: str
    outcome: str
    reason: str
    count: int = 0
    last_at: float = 0.0
    message: str = ""
    request_id: str = ""


class RecentFailures:
    """Kinds of failures, the latest first; the oldest goes when there are more than `kinds`."""

    def __init__(self, kinds: int = 20, clock: Callable[[], float] = time.monotonic) -> None:
        self._kinds = kinds
        self._clock = clock
        self._failures: OrderedDict[tuple[str, str, str], Failure] = OrderedDict()

    def add(self, model: str, outcome: str, reason: str, message: str, request_id: str) -> None:
        """One more of this kind."""
        key = model, outcome, reason
        failure = self._failures.setdefault(key, Failure(*key))
        self._failures.move_to_end(key)
        failure.count += 1
        failure.last_at = self._clock()
        failure.message = message[:_LONGEST]
        failure.request_id = request_id[:_LONGEST]
        if len(self._failures) > self._kinds:
            self._failures.popitem(last=False)

    def latest_first(self) -> list[Failure]:
        """All that is remembered."""
        return list(reversed(self._failures.values()))
