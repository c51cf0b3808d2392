"""The metrics of several processes as those of one.

What only grows is added, and what dead processes have counted stays in the
sums, so that no counter goes down. Gauges are of living processes alone: added
where each process has a share, the greatest where each has a view of the same
thing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_GROWING = frozenset({"counter", "histogram", "summary"})
# Of the gauges of workers, those that are about our own requests; the rest are views of the worker.
_SHARES = frozenset({"router_worker_in_flight", "router_worker_reserved_tokens"})
_ALIKE = frozenset({"router_vision_backend", "process_max_fds"})
_OLDEST = frozenset({"process_start_time_seconds"})

# Where the workers that a process has registered are to be seen.
_WORKERS = "router_worker_state"

_Key = tuple[str, tuple[tuple[str, str], ...]]


def parsed(text: str) -> list[Metric]:
    """The families of one process' /metrics in the classic text format."""
    return list(text_string_to_metric_families(text))


def growing(families: Iterable[Metric]) -> list[Metric]:
    """Those that may only grow."""
    return [family for family in families if family.type in _GROWING]


def merged(parts: Iterable[Iterable[Metric]]) -> list[Metric]:
    """One family for each name, with one sample for each set of labels."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[_Key, Sample]] = {}
    for part in parts:
        for family in part:
            if family.name not in families:
                families[family.name] = Metric(family.name, family.documentation, family.type)
            combine = _combination(family)
            samples = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                before = samples.get(key)
                value = sample.value if before is None else combine(before.value, sample.value)
                samples[key] = Sample(sample.name, sample.labels, value)
    for name, family in families.items():
        family.samples = list(values[name].values())
    return list(families.values())


def workers(families: Iterable[Metric]) -> set[str]:
    """The addresses of the workers that are registered."""
    return {s.labels["worker"] for f in families if f.name == _WORKERS for s in f.samples}


def of_workers(families: Iterable[Metric], present: set[str]) -> list[Metric]:
    """The families without series of workers that are not `present`, as a process drops them."""
    kept = []
    for family in families:
        copy = Metric(family.name, family.documentation, family.type)
        copy.samples = [
            s for s in family.samples if "worker" not in s.labels or s.labels["worker"] in present
        ]
        if copy.samples:
            kept.append(copy)
    return kept


def _combination(family: Metric) -> Callable[[float, float], float]:
    name = family.name
    if family.type in _GROWING:
        return operator.add
    if name in _OLDEST:
        return min
    view_of_worker = name.startswith("router_worker_") and name not in _SHARES
    if view_of_worker or name.endswith("_info") or name in _ALIKE:
        return max
    return operator.add


class Retired:
    """What processes that are dead have counted."""

    def __init__(self) -> None:
        self.families: Sequence[Metric] = ()

    def add(self, last: Iterable[Metric]) -> None:
        """Takes over the last numbers known of a process that has died."""
        self.families = merged([self.families, growing(last)])

    def keep_workers(self, present: set[str]) -> None:
        """Forgets the series of workers that no living process has."""
        if present:
            self.families = of_workers(self.families, present)
