"""Numbers that somebody keeps anyway, read when metrics are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Reading = tuple[Sequence[str], float]


@dataclass(frozen=True)
class Source:
    """One metric: `read` gives a value for each set of label values, at this moment.

    Counters are named without `_total`.
    """

    name: str
    about: str
    read: Callable[[], list[Reading]]
    labels: Sequence[str] = ()
    counter: bool = False


class Snapshot(Collector):
    """Reads its sources at every scrape."""

    def __init__(self, registry: CollectorRegistry, sources: Sequence[Source]) -> None:
        self._sources = sources
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """The metrics without their values, so that none is registered twice."""
        return (_family(source) for source in self._sources)

    def collect(self) -> Iterator[Metric]:
        """The metrics as of now."""
        for source in self._sources:
            family = _family(source)
            for labels, value in source.read():
                family.add_metric(labels, value)
            yield family


def _family(source: Source) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if source.counter else GaugeMetricFamily
    return kind(source.name, source.about, labels=source.labels)


def one(read: Callable[[], float]) -> Callable[[], list[Reading]]:
    """The reading of a metric without labels."""
    return lambda: [((), read())]
