"""One request inside the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from workers.sim.kvcache import Holding, Placed, Stored
from workers.sim.output import Output


@dataclass(eq=False)
class Job:
    """What the request computes, and how far it has come.

    `ids` is the expanded prompt (uint32 [n]); `outputs` are its choices,
    complete from the start since the answer is known. Whoever drives the job
    waits only in `pause`, so that `abort` and `kill` are felt at once.
    """

    request_id: str
    ids: np.ndarray
    placed: tuple[Placed, ...]
    outputs: Sequence[Output]
    # Its prompt was computed by another worker and handed over.
    prefilled: bool = False
    chained: list[Stored] = field(default_factory=list)
    holding: Holding | None = None
    cached_tokens: int = 0
    uncached_tokens: int = 0
    sent_tokens: int = 0
    aborted: bool = False
    killed: bool = False
    _wake: asyncio.Future[None] | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids)

    @property
    def total_tokens(self) -> int:
        """The most tokens it will hold in the cache."""
        return len(self.ids) + sum(len(output.ids) for output in self.outputs)

    @property
    def ended(self) -> bool:
        return self.aborted or self.killed

    async def pause(self, seconds: float | None) -> None:
        """Waits `seconds` (None: without end) or until something wakes the job."""
        if self.ended or (seconds is not None and seconds <= 0):
            return
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, self.wake)
        try:
            await self._wake
        finally:
            if timer is not None:
                timer.cancel()
            self._wake = None

    def wake(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def abort(self) -> None:
        """Ends the job as its owner asked: what it has said so far stands."""
        self.aborted = True
        self.wake()

    def kill(self) -> None:
        """Ends the job because the engine has died."""
        self.killed = True
        self.wake()
