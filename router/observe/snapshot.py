"""Numbers that somebody keeps anyway, read when metrics are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Reading = tuple[Sequence[str], float]


@dataclass(frozen=True)
class Source:
    """One metric: `read` gives a value for each set of label values, at this moment.

    It is called on the event loop's thread. Counters are named without `_total`.
    """

    name: str
    about: str
    read: Callable[[], list[Reading]]
    labels: Sequence[str] = ()
    counter: bool = False

    def family(self, readings: Iterable[Reading]) -> Metric:
        """The metric with these values."""
        kind = CounterMetricFamily if self.counter else GaugeMetricFamily
        family = kind(self.name, self.about, labels=self.labels)
        for labels, value in readings:
            family.add_metric(labels, value)
        return family


class Snapshot(Collector):
    """Reads its sources anew whenever it is collected."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def describe(self) -> Iterator[Metric]:
        """The metrics without their values, so that none is registered twice."""
        return (source.family(()) for source in self._sources)

    def collect(self) -> Iterator[Metric]:
        """The metrics as of now."""
        return self.taken().collect()

    def taken(self) -> Taken:
        """The values as of now, to be made into metrics later, in any thread."""
        return Taken([(source, source.read()) for source in self._sources])


@dataclass(frozen=True)
class Taken(Collector):
    """Values that were read."""

    readings: Sequence[tuple[Source, list[Reading]]]

    def collect(self) -> Iterator[Metric]:
        """The metrics of the moment at which they were read."""
        return (source.family(readings) for source, readings in self.readings)


def one(read: Callable[[], float]) -> Callable[[], list[Reading]]:
    """The reading of a metric without labels."""
    return lambda: [((), read())]
