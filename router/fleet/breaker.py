"""A circuit breaker for one worker: pure, with an injected clock.

closed -> open when enough calls of the rolling window failed; open ->
half-open after a while; half-open admits a few probes, the first failure
opens it again and a full set of successes closes it. A probe succeeds when it
is answered, and not when its answer is over: that may take minutes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CallResult(Enum):
    """What a finished call says about the worker's health."""

    SUCCESS = "success"
    FAILURE = "failure"
    # Cancelled, client's fault, or the worker's own "busy": says nothing.
    NEUTRAL = "neutral"


@dataclass(frozen=True)
class BreakerSettings:
    """`window` and `open_for` are in seconds, `failure_ratio` in (0, 1]."""

    min_calls: int = 5
    failure_ratio: float = 0.5
    window: float = 30.0
    open_for: float = 10.0
    probes: int = 1


class Permit:
    """The right to one call; every outcome gives it back, exactly once counted."""

    __slots__ = ("_answered", "_breaker", "_done", "_epoch", "_probe")

    def __init__(self, breaker: Breaker, epoch: int, *, probe: bool) -> None:
        self._breaker = breaker
        self._epoch = epoch
        self._probe = probe
        self._answered = False
        self._done = False

    def answered(self) -> None:
        """Reports that the worker has begun to answer; only the first report counts."""
        if self._probe and not self._answered and not self._done:
            self._answered = True
            self._epoch = self._breaker._answered(self._epoch)

    def finish(self, result: CallResult) -> None:
        """Reports the call's end; a second report is ignored."""
        if self._done:
            return
        self._done = True
        if self._answered:
            self._breaker._ended(self._epoch, result)
        else:
            self._breaker._finished(self._epoch, result)


class Breaker:
    """`clock` gives seconds; `on_change` hears of every change of state."""

    def __init__(
        self,
        settings: BreakerSettings,
        clock: Callable[[], float],
        on_change: Callable[[BreakerState], None] | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._on_change = on_change
        self._state = BreakerState.CLOSED
        # Counts changes of state: a result that began in an earlier state says nothing now.
        self._epoch = 0
        self._opened_at = 0.0
        self._calls: deque[tuple[float, bool]] = deque()
        self._failures = 0
        self._probing = 0
        self._probes_passed = 0

    @property
    def state(self) -> BreakerState:
        """The state at this moment; an open breaker whose time is over is half-open."""
        if (
            self._state is BreakerState.OPEN
            and self._clock() - self._opened_at >= self._settings.open_for
        ):
            self._enter(BreakerState.HALF_OPEN)
        return self._state

    def admits(self) -> bool:
        """Whether `acquire` would give a permit now."""
        state = self.state
        if state is BreakerState.HALF_OPEN:
            return self._probing + self._probes_passed < self._settings.probes
        return state is BreakerState.CLOSED

    def acquire(self) -> Permit | None:
        """A permit for one call, or None when the breaker admits none."""
        if not self.admits():
            return None
        probe = self._state is BreakerState.HALF_OPEN
        if probe:
            self._probing += 1
        return Permit(self, self._epoch, probe=probe)

    def _answered(self, epoch: int) -> int:
        """A probe has its answer; returns the epoch in which its end counts."""
        if epoch != self._epoch:
            return epoch
        self._probing -= 1
        self._passed()
        return self._epoch

    def _ended(self, epoch: int, result: CallResult) -> None:
        """The end of a probe that had an answer: its word is taken back if that broke off.

        Once others have succeeded its word is not needed, and it counts as one call of many.
        """
        if epoch != self._epoch or result is CallResult.NEUTRAL:
            return
        failed = result is CallResult.FAILURE
        needed = self._state is BreakerState.HALF_OPEN or self._failures == len(self._calls)
        if failed and needed:
            self._enter(BreakerState.OPEN)
        elif self._state is BreakerState.CLOSED:
            self._count(failed=failed)

    def _finished(self, epoch: int, result: CallResult) -> None:
        if epoch != self._epoch:
            return
        if self._state is BreakerState.HALF_OPEN:
            self._probing -= 1
            if result is CallResult.FAILURE:
                self._enter(BreakerState.OPEN)
            elif result is CallResult.SUCCESS:
                self._passed()
        elif self._state is BreakerState.CLOSED and result is not CallResult.NEUTRAL:
            self._count(failed=result is CallResult.FAILURE)

    def _passed(self) -> None:
        self._probes_passed += 1
        if self._probes_passed >= self._settings.probes:
            self._enter(BreakerState.CLOSED)

    def _count(self, *, failed: bool) -> None:
        now = self._clock()
        self._calls.append((now, failed))
        self._failures += failed
        while self._calls and now - self._calls[0][0] > self._settings.window:
            self._failures -= self._calls.popleft()[1]
        if (
            failed
            and len(self._calls) >= self._settings.min_calls
            and self._failures >= self._settings.failure_ratio * len(self._calls)
        ):
            self._enter(BreakerState.OPEN)

    def _enter(self, state: BreakerState) -> None:
        self._state = state
        self._epoch += 1
        self._probing = self._probes_passed = 0
        if state is BreakerState.OPEN:
            self._opened_at = self._clock()
        if state is BreakerState.CLOSED:
            self._calls.clear()
            self._failures = 0
        if self._on_change:
            self._on_change(state)
