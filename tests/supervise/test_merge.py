"""Metrics of several processes, and of those that were."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from router.supervise.merge import Retired, growing, merged, parsed


class Process:
    """What one process would expose."""

    def __init__(self, requests: int, *, state: str = "ready", worker: str = "w:1") -> None:
        self.registry = registry = CollectorRegistry()
        counter = Counter("router_requests", "Requests.", ["outcome"], registry=registry)
        counter.labels("ok").inc(requests)
        seconds = Histogram("router_seconds", "Times.", buckets=(1, 10), registry=registry)
        for _ in range(requests):
            seconds.observe(5)
        attempts = Counter("router_attempts", "Calls.", ["worker"], registry=registry)
        attempts.labels(worker).inc(requests)
        Gauge("router_at_work", "Places.", registry=registry).set(requests)
        Gauge("router_worker_in_flight", "Held.", ["worker"], registry=registry).labels(worker).set(
            requests
        )
        states = Gauge("router_worker_state", "States.", ["worker", "state"], registry=registry)
        for name in ("ready", "unhealthy"):
            states.labels(worker, name).set(name == state)
        Gauge("router_worker_load_age_seconds", "Age.", ["worker"], registry=registry).labels(
            worker
        ).set(requests / 10)
        Gauge("process_start_time_seconds", "Start.", registry=registry).set(1000 + requests)
        Gauge("router_build_info", "What.", ["version"], registry=registry).labels("1").set(1)

    @property
    def families(self) -> list[Metric]:
        return parsed(generate_latest(self.registry).decode())


def values(families: list[Metric]) -> dict[str, float]:
    """Samples by name and labels as they are written."""
    return {
        s.name + "".join(f"{{{v}}}" for _, v in sorted(s.labels.items())): s.value
        for family in families
        for s in family.samples
    }


def test_what_grows_and_what_is_shared_is_added() -> None:
    shown = values(merged([Process(3).families, Process(4).families]))
    assert shown["router_requests_total{ok}"] == 7
    assert shown["router_seconds_bucket{1.0}"] == 0
    assert shown["router_seconds_bucket{10.0}"] == shown["router_seconds_bucket{+Inf}"] == 7
    assert (shown["router_seconds_count"], shown["router_seconds_sum"]) == (7, 35)
    assert shown["router_at_work"] == 7
    assert shown["router_worker_in_flight{w:1}"] == 7


def test_views_of_the_same_thing_are_not_added() -> None:
    shown = values(merged([Process(3).families, Process(4, state="unhealthy").families]))
    assert shown["router_worker_state{ready}{w:1}"] == 1
    assert shown["router_worker_state{unhealthy}{w:1}"] == 1
    assert shown["router_worker_load_age_seconds{w:1}"] == 0.4
    assert shown["router_build_info{1}"] == 1
    assert shown["process_start_time_seconds"] == 1003


def test_one_process_alone_is_shown_as_it_is() -> None:
    alone = Process(3).families
    assert values(merged([alone])) == values(alone)


def test_series_of_one_set_of_labels_stay_together() -> None:
    first, second = Process(1), Process(2, worker="w:2")
    families = merged([first.families, second.families])
    again = parsed(generate_latest(_Collected(families)).decode())  # type: ignore[arg-type]
    assert values(again) == values(families)
    assert {"router_attempts_total{w:1}", "router_attempts_total{w:2}"} <= values(again).keys()


def test_the_dead_count_on_but_show_no_gauges() -> None:
    retired = Retired()
    retired.add(Process(5).families)
    shown = values(merged([Process(1).families, retired.families]))
    assert shown["router_requests_total{ok}"] == 6
    assert shown["router_seconds_count"] == 6
    assert shown["router_at_work"] == 1
    assert shown["process_start_time_seconds"] == 1001


def test_fifty_deaths_leave_no_more_than_one() -> None:
    retired = Retired()
    retired.add(Process(1).families)
    size = len(values(list(retired.families)))
    for _ in range(49):
        retired.add(Process(1).families)
    assert len(values(list(retired.families))) == size
    assert values(list(retired.families))["router_requests_total{ok}"] == 50


def test_workers_that_nobody_has_are_forgotten_in_time() -> None:
    retired = Retired()
    retired.add(Process(5, worker="gone:1").families)
    retired.add(Process(5, worker="w:1").families)
    retired.keep_workers(set())  # nobody knows any worker: that says nothing
    assert values(list(retired.families))["router_attempts_total{gone:1}"] == 5
    retired.keep_workers({"w:1"})
    kept = values(list(retired.families))
    assert "router_attempts_total{gone:1}" not in kept
    assert kept["router_attempts_total{w:1}"] == 5
    assert kept["router_requests_total{ok}"] == 10


def test_a_process_that_gives_no_answer_keeps_what_it_counted() -> None:
    names = values(growing(Process(2).families)).keys()
    assert "router_requests_total{ok}" in names
    assert not any("worker_state" in name or "at_work" in name for name in names)


class _Collected:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
