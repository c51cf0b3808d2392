"""Waiting for what nobody announces. A test that waits for ever fails by its timeout."""

from __future__ import annotations

import asyncio

from tests.real.asking import running
from tests.real.stack import Router, Worker


async def until_idle(address: str) -> None:
    """Waits until a worker runs nothing."""
    while await running(address):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def until_in_flight(router: Router, worker: Worker) -> None:
    """Waits until a request is on its way to a worker."""
    while not router.metric("router_worker_in_flight", worker=worker.address):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def until_not_ready(router: Router) -> None:
    """Waits until a router has noticed that it can serve nobody."""
    while await asyncio.to_thread(router.ready):  # noqa: ASYNC110
        await asyncio.sleep(0.1)
