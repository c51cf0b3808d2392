"""Whether and when another attempt is made: pure, with injected randomness."""

from __future__ import annotations

import random
from dataclasses import dataclass

from router.request.failure import Again, Failure


@dataclass(frozen=True)
class RetrySettings:
    """Pauses in seconds; each is `growth` times the last, +-`jitter`, at most `longest`."""

    max_attempts: int = 3
    first_pause: float = 0.05
    growth: float = 1.5
    jitter: float = 0.2
    longest: float = 2.0


class RetryBudget:
    """A token bucket over the whole fleet, as gRPC's retry throttling has it (gRFC A6).

    A failure takes one token, a success gives `ratio` back, and retries are
    made only while more than half of the bucket is left, so that a fleet in
    trouble is not asked three times as often.
    """

    def __init__(self, capacity: float = 40.0, ratio: float = 0.1) -> None:
        self.capacity = capacity
        self._ratio = ratio
        self.tokens = capacity

    def succeeded(self) -> None:
        self.tokens = min(self.capacity, self.tokens + self._ratio)

    def failed(self) -> None:
        self.tokens = max(0.0, self.tokens - 1)

    @property
    def allows(self) -> bool:
        """Whether a retry may be made now."""
        return self.tokens > self.capacity / 2


class Attempts:
    """The attempts of one request."""

    def __init__(self, settings: RetrySettings, budget: RetryBudget, rng: random.Random) -> None:
        self._settings = settings
        self._budget = budget
        self._rng = rng
        self._once_used = False
        self.made = 0

    def pause_after(self, failure: Failure, *, time_left: float) -> float | None:
        """Seconds to wait before the next attempt, or None for no further one."""
        if failure.counts_against_budget:
            self._budget.failed()
        if failure.again is Again.NO or self.made >= self._settings.max_attempts:
            return None
        if failure.again is Again.ONCE:
            if self._once_used:
                return None
            self._once_used = True
        if not self._budget.allows:
            return None
        if failure.pushback is not None:
            pause = failure.pushback
        else:
            pause = self._settings.first_pause * self._settings.growth ** (self.made - 1)
            pause = min(pause, self._settings.longest)
            pause *= self._rng.uniform(1 - self._settings.jitter, 1 + self._settings.jitter)
        return pause if 0 <= pause < time_left else None
