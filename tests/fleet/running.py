"""A fleet in this process, without a router around it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from router.fleet.fleet import Fleet
from router.fleet.probe import ProbeSettings
from router.fleet.registry import Registry
from router.observe.metrics import Metrics
from workers.sim import SimOptions, SimWorker

BRISK = ProbeSettings(
    health_interval=0.05, load_interval=0.05, metadata_interval=0.1, health_timeout=5.0
)


@asynccontextmanager
async def fleet(
    *,
    drain_timeout: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """A fleet whose probes are brisk, unless `settings` (of ProbeSettings) say otherwise."""
    running = Fleet(
        Registry(Metrics(), clock=clock), replace(BRISK, **settings), drain_timeout=drain_timeout
    )
    try:
        yield running
    finally:
        await running.close()


@asynccontextmanager
async def sim(
    options: SimOptions | None = None, listen: str = "127.0.0.1:0"
) -> AsyncIterator[SimWorker]:
    """A simulated worker; stopping it within the block is fine."""
    worker = SimWorker(options or SimOptions())
    await worker.start(listen)
    try:
        yield worker
    finally:
        await worker.stop(0)
