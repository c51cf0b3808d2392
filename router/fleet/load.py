"""What a worker has to do: as it reported, and as we reserved.

A reservation is made in the same step as the choice and given back exactly
once, on the object that it was taken from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ReportedLoad:
    """One report; None where the worker did not say. Rates in tokens/s, `at` in seconds."""

    at: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    waiting_uncached_tokens: int | None = None
    generation_rate: float | None = None
    max_running: int | None = None


class Load:
    """Reservations and the last report of one worker."""

    __slots__ = ("_on_change", "idle", "in_flight", "reported", "reserved_tokens")

    def __init__(self, on_change: Callable[[int], None] | None = None) -> None:
        self.in_flight = 0
        self.reserved_tokens = 0
        self.reported: ReportedLoad | None = None
        self._on_change = on_change
        # Set while nothing is reserved.
        self.idle = asyncio.Event()
        self.idle.set()

    def reserve(self, tokens: int) -> None:
        """One more request of so many prompt tokens."""
        self.in_flight += 1
        self.reserved_tokens += tokens
        self.idle.clear()
        if self._on_change:
            self._on_change(self.in_flight)

    def give_back(self, tokens: int) -> None:
        """Undoes one `reserve` of the same tokens."""
        self.in_flight -= 1
        self.reserved_tokens -= tokens
        if not self.in_flight:
            self.idle.set()
        if self._on_change:
            self._on_change(self.in_flight)
