"""A worker's load as RouterAdmin shows it."""

from __future__ import annotations

from router.fleet.worker import Worker
from router.wire import admin


def show_load(worker: Worker, now: float) -> admin.Load:
    """`now` is on the registry's clock, in seconds."""
    load = worker.load
    shown = admin.Load(
        in_flight=load.in_flight,
        reserved_tokens=load.reserved_tokens,
        breaker=worker.breaker.state.value,
    )
    report = load.reported
    if report is not None:
        if report.running is not None:
            shown.running = report.running
        if report.waiting is not None:
            shown.waiting = report.waiting
        shown.age_seconds = max(0.0, now - report.at)
    return shown
