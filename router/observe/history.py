"""The last minutes of a few numbers, for the status page."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trend:
    """A number worth a plot. With `rate`, `read` only grows and its growth per second is shown."""

    title: str
    read: Callable[[], float]
    rate: bool = False


@dataclass
class History:
    """A ring of samples of each trend, `interval` seconds apart."""

    trends: Sequence[Trend]
    interval: float = 5.0
    length: int = 120
    _samples: list[deque[float]] = field(init=False)
    _last: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._samples = [deque(maxlen=self.length) for _ in self.trends]
        self._last = [trend.read() for trend in self.trends]

    @property
    def seconds(self) -> float:
        """How far back a full ring goes."""
        return self.interval * self.length

    def series(self) -> list[tuple[str, list[float]]]:
        """Title and samples of each trend, oldest first."""
        return [(t.title, list(s)) for t, s in zip(self.trends, self._samples, strict=True)]

    def sample(self, elapsed: float) -> None:
        """Takes a sample, `elapsed` seconds after the last one."""
        for i, trend in enumerate(self.trends):
            value = trend.read()
            grown = (value - self._last[i]) / elapsed
            self._samples[i].append(grown if trend.rate else value)
            self._last[i] = value

    async def run(self) -> None:
        """Samples until cancelled."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(self.interval)
            now = loop.time()
            self.sample(now - last)
            last = now
