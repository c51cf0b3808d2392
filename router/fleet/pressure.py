"""How long a new request would wait at a worker: what lies there, and how fast it goes.

Our own requests are counted exactly and at once; the worker's reports add what
other routers sent there. The rate is measured, not believed: prompt tokens
that led to a first output, per second in which any was awaited. So a slow
worker is known as slow, whatever makes it slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

# What a request costs besides its tokens, in tokens: a scheduler step and the
# first decode. Without it a worker that gets short prompts would seem slow.
OVERHEAD_TOKENS = 256

# Seconds of work after which a measurement counts half.
_HALF_LIFE = 20.0
# Seconds of work from which on a measured rate is believed.
_ENOUGH = 0.5


class Pressure(NamedTuple):
    """A worker's work at one moment.

    queued: prompt tokens to be computed before a new request's, overheads included.
    rate: measured tokens per second, None while not known.
    in_flight: our requests there, and context_tokens their prompts' lengths.
    slots: requests that it runs at once, None while not known.
    slot_wait: seconds until a slot is free.
    silence: seconds since it last gave any output while it had work.
    """

    queued: float = 0.0
    rate: float | None = None
    in_flight: int = 0
    context_tokens: int = 0
    slots: int | None = None
    slot_wait: float = 0.0
    silence: float = 0.0

    def wait(self, ordinary_rate: float) -> float:
        """Expected seconds until a new request's prompt is begun."""
        return self.queued / (self.rate or ordinary_rate) + self.slot_wait


class Place:
    """One request's place in a worker's backlog, given up exactly once."""

    __slots__ = ("_backlog", "context_tokens", "done", "over", "tokens")

    def __init__(self, backlog: Backlog, tokens: int, context_tokens: int) -> None:
        self._backlog = backlog
        self.tokens = tokens
        self.context_tokens = context_tokens
        self.done = False
        self.over = False

    def first_output(self) -> None:
        """Its prompt is done; only the first call does anything."""
        if not self.done:
            self.done = True
            self._backlog._first_output(self)

    def finish(self) -> None:
        """The request is over, answered or not; only the first call does anything."""
        if not self.over:
            self.over = True
            self._backlog._finish(self)


class Backlog:
    """Requests of one worker from reservation to first output, and from there to the end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Those without output yet, in the order they came.
        self._waiting: dict[Place, None] = {}
        # Those whose first output will not tell when their prompt was done.
        self._untold: set[Place] = set()
        self._queued = 0
        self._busy_since = 0.0
        # Decayed tokens done and seconds of work.
        self._done = 0.0
        self._seconds = 0.0
        # Decayed number of requests that came to their end.
        self._finished = 0.0
        self._finished_at = clock()
        # Tokens of other routers by the last report, and by the last two together.
        self._last_foreign = 0.0
        self._foreign = 0.0
        self._foreign_at = 0.0
        self._silence = 0.0
        self._silence_at = 0.0
        self.in_flight = 0
        self.context_tokens = 0
        self.slots: int | None = None

    # -- Our own requests

    def reserve(self, uncached_tokens: int, context_tokens: int, *, told: bool = True) -> Place:
        """A request is on its way there, with so many prompt tokens to compute and in all.

        Unless `told`, its output comes in one piece at its end: it is taken to
        wait for so long, and nothing is measured by it.
        """
        place = Place(self, uncached_tokens + OVERHEAD_TOKENS, context_tokens)
        if not told:
            self._untold.add(place)
        else:
            if not self._waiting:
                self._busy_since = self._clock()
            self._waiting[place] = None
        self._queued += place.tokens
        self.in_flight += 1
        self.context_tokens += context_tokens
        return place

    def _first_output(self, place: Place) -> None:
        if place in self._waiting:
            self._leave_queue(place)
            self._done += place.tokens
        self._leave_untold(place)
        self._silence = 0.0

    def _finish(self, place: Place) -> None:
        if place in self._waiting:
            self._leave_queue(place)
        self._leave_untold(place)
        self.in_flight -= 1
        self.context_tokens -= place.context_tokens
        now = self._clock()
        self._finished = self._finished * _fading(now - self._finished_at) + 1
        self._finished_at = now

    def _leave_untold(self, place: Place) -> None:
        if place in self._untold:
            self._untold.remove(place)
            self._queued -= place.tokens

    def _leave_queue(self, place: Place) -> None:
        now = self._clock()
        worked = now - self._busy_since
        self._busy_since = now
        self._done *= _fading(worked)
        self._seconds = self._seconds * _fading(worked) + worked
        del self._waiting[place]
        self._queued -= place.tokens

    # -- What the worker says

    def reported(self, pending_tokens: int | None, silence: float | None) -> None:
        """A report: prompt tokens that wait there, ours among them, and silence in seconds."""
        now = self._clock()
        if pending_tokens is not None:
            foreign = max(0.0, float(pending_tokens - self._queued))
            # A prompt of ours that was done between the report and its arrival
            # looks foreign, but only once.
            self._foreign, self._foreign_at = min(foreign, self._last_foreign), now
            self._last_foreign = foreign
        # Whoever does not speak of silence any more must not stay vetoed for an old one:
        # without requests it would have no output to end it with.
        self._silence, self._silence_at = silence or 0.0, now

    # -- What follows

    @property
    def rate(self) -> float | None:
        """Prompt tokens per second of work, None until enough was seen."""
        return self._done / self._seconds if self._seconds >= _ENOUGH and self._done else None

    def pressure(self) -> Pressure:
        """As of now."""
        now, rate, queued = self._clock(), self.rate, float(self._queued)
        if self._waiting and rate:
            # What is done of the oldest prompt by now.
            oldest = next(iter(self._waiting)).tokens
            queued -= min(rate * (now - self._busy_since), oldest)
        if self._foreign:
            queued += max(0.0, self._foreign - (rate or 0.0) * (now - self._foreign_at))
        silence = self._silence
        if silence and self.in_flight:
            # It has not spoken since the report either.
            silence += now - self._silence_at
        slots = self.slots
        return Pressure(
            queued,
            rate,
            self.in_flight,
            self.context_tokens,
            slots,
            self._slot_wait(now, slots) if slots and self.in_flight >= slots else 0.0,
            silence,
        )

    def _slot_wait(self, now: float, slots: int) -> float:
        # A decayed count over its mean lifetime is a rate (events per second).
        faded = self._finished * _fading(now - self._finished_at)
        turnover = max(faded * math.log(2) / _HALF_LIFE, 0.1)
        return (self.in_flight - slots + 1) / turnover


def _fading(seconds: float) -> float:
    return math.exp2(-seconds / _HALF_LIFE)
