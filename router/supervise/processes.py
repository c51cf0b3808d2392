"""The processes that live now, asked as one: are they ready, and what have they counted?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.observe.metrics import encoder
from router.supervise.child import Child
from router.supervise.merge import Retired, growing, merged, parsed, workers

# Seconds for an answer of a process: for probes, whose own limit may be one second, and scrapes.
_PROBE, _SCRAPE = 0.9, 2.0


class Processes:
    """Owns the list of living processes and the sums of dead ones."""

    def __init__(self, count: int) -> None:
        self.stopping = False
        self._living: dict[int, Child] = {}
        # Those that have not been up yet.
        self._awaited = set(range(count))
        self._retired = Retired()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.restarts = Counter(
            "router_process_restarts", "Router processes replaced.", registry=self.registry
        )
        listening = Gauge(
            "router_processes", "Router processes that take connections.", registry=self.registry
        )
        listening.set_function(lambda: len(self.listening))

    @property
    def living(self) -> list[Child]:
        """All of them, by number."""
        return [self._living[number] for number in sorted(self._living)]

    @property
    def listening(self) -> list[Child]:
        """Those that take connections."""
        return [child for child in self.living if child.listens]

    def add(self, child: Child) -> None:
        """One that was started."""
        self._living[child.number] = child

    def remove(self, child: Child) -> None:
        """One that has ended: what it counted stays."""
        del self._living[child.number]
        self._retired.add(parsed(child.metrics))

    # -- Probes

    async def why_not_ready(self) -> str | None:
        """None when every process that takes connections is ready.

        One that is being replaced takes none, so it does not count; at the
        start all of them do.
        """
        if self.stopping:
            return "the router is stopping"
        self._awaited -= {child.number for child in self.listening}
        if self._awaited:
            return f"process {min(self._awaited)} is starting"
        return await self._first_trouble("/readyz") or self._nobody()

    async def why_not_live(self) -> str | None:
        """None unless a process that takes connections does not answer."""
        return await self._first_trouble("/livez")

    async def _first_trouble(self, path: str) -> str | None:
        asked = self.listening
        answers = await asyncio.gather(*(child.ask(path, _PROBE) for child in asked))
        for child, answer in zip(asked, answers, strict=True):
            if not child.listens:
                continue  # ended meanwhile
            if answer is None:
                return f"process {child.number} does not answer"
            status, text = answer
            if status != 200:
                return text.strip()
        return None

    def _nobody(self) -> str | None:
        return None if self.listening else "every process is being replaced"

    # -- Metrics

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics of all processes in the format of the Accept header, and its content type.

        One that does not answer shows what it had counted, and no gauges.
        """
        asked = self.living
        fresh = await self._read(asked)
        present = [child for child in self.living if child in asked]
        texts = [(child.metrics, child in fresh) for child in present]
        own = list(self.registry.collect())
        retired = self._retired.families
        encode, content_type = encoder(accept)

        def text() -> tuple[bytes, set[str]]:
            read = [(parsed(metrics), is_fresh) for metrics, is_fresh in texts]
            known = set[str]().union(*(workers(families) for families, _ in read))
            shown = [families if is_fresh else growing(families) for families, is_fresh in read]
            return encode(_Shown(merged([*shown, own, retired]))), known

        body, known = await asyncio.to_thread(text)
        if len(fresh) == len(self.living):
            self._retired.keep_workers(known)
        return body, content_type

    async def keep_reading(self, interval: float) -> None:
        """Reads all metrics now and then until cancelled, for processes that die between scrapes.

        Only as text: it is parsed if it comes to that.
        """
        while True:
            await asyncio.sleep(interval)
            await self._read(self.listening)

    async def _read(self, asked: Sequence[Child]) -> set[Child]:
        answered = await asyncio.gather(*(child.read_metrics(_SCRAPE) for child in asked))
        return {child for child, given in zip(asked, answered, strict=True) if given}


class _Shown(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families
