"""Workers as metrics show them, read at every scrape.

By address, of the workers that stand there: one that is replaced and only
finishes what it has is not shown, and with a worker its series go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from router.fleet.breaker import BreakerState
from router.fleet.load import ReportedLoad
from router.fleet.role import effective_role
from router.fleet.worker import Worker, WorkerState
from router.observe.snapshot import Reading, Source

if TYPE_CHECKING:
    from router.fleet.registry import Registry

_INFO = (
    *("worker", "model", "role", "mm_processor", "schemes", "pixels", "encoder_dtype"),
    *("context_length", "block_size", "max_num_seqs", "kv_connector"),
)


def worker_gauges(registry: Registry) -> list[Source]:
    """State, load, breaker and capability of every worker that is registered."""

    def each(name: str, about: str, value: Callable[[Worker], float | None]) -> Source:
        def read() -> list[Reading]:
            values = ((w.address, value(w)) for w in registry.standing)
            return [((address,), v) for address, v in values if v is not None]

        return Source(name, about, read, ("worker",))

    def reported(name: str, about: str, value: Callable[[ReportedLoad], float | None]) -> Source:
        def of(worker: Worker) -> float | None:
            report = worker.load.reported
            return None if report is None else value(report)

        return each(name, about, of)

    def age(report: ReportedLoad) -> float:
        return registry.clock() - report.at

    return [
        Source(
            "router_worker_state",
            "1 for the state that a worker is in.",
            lambda: _one_of(registry, WorkerState, lambda w: w.state),
            ("worker", "state"),
        ),
        Source(
            "router_worker_breaker_state",
            "1 for the state that a worker's breaker is in.",
            lambda: _one_of(registry, BreakerState, lambda w: w.breaker.state),
            ("worker", "state"),
        ),
        Source(
            "router_worker_info",
            "1; what a worker says of itself is in the labels, empty where it says nothing.",
            lambda: [(_info(worker), 1) for worker in registry.standing],
            _INFO,
        ),
        each(
            "router_worker_in_flight",
            "Requests that a worker holds for us.",
            lambda w: w.load.in_flight,
        ),
        each(
            "router_worker_reserved_tokens",
            "Prompt tokens of the requests that a worker holds for us, media expanded.",
            lambda w: w.load.reserved_tokens,
        ),
        each(
            "router_worker_expected_wait_seconds",
            "How long a new request would wait at a worker, as least_load and power_of_two see it.",
            lambda w: w.expected_wait,
        ),
        reported(
            "router_worker_running_requests",
            "Requests that run at a worker, by its own report.",
            lambda report: report.running,
        ),
        reported(
            "router_worker_waiting_requests",
            "Requests that wait at a worker, by its own report.",
            lambda report: report.waiting,
        ),
        reported(
            "router_worker_kv_usage_ratio",
            "Share of a worker's KV cache that is in use, by its own report.",
            lambda report: report.kv_usage,
        ),
        reported("router_worker_load_age_seconds", "Age of a worker's last load report.", age),
    ]


def _one_of(
    registry: Registry,
    states: type[WorkerState] | type[BreakerState],
    state_of: Callable[[Worker], WorkerState | BreakerState],
) -> list[Reading]:
    return [
        ((worker.address, state.value), state_of(worker) is state)
        for worker in registry.standing
        for state in states
    ]


def _info(worker: Worker) -> tuple[str, ...]:
    known = worker.capability
    if known is None:
        return worker.address, "", effective_role(worker).value, *("" for _ in _INFO[3:])
    return (
        worker.address,
        known.served_name,
        effective_role(worker).value,
        known.mm_processor,
        ",".join(sorted(known.schemes)),
        "raw" if known.device_normalize else "normalized",
        known.encoder_dtype,
        *(str(n or "") for n in (known.context_length, known.block_size, known.max_num_seqs)),
        known.kv_connector,
    )
