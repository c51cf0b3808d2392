"""How late the event loop is: the first sign of work that does not belong on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_INTERVAL = 0.1


async def watch_loop_lag(observe: Callable[[float], None]) -> None:
    """Reports, ten times a second until cancelled, by how many seconds a sleep overran."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _INTERVAL
        await asyncio.sleep(_INTERVAL)
        observe(max(0.0, loop.time() - due))
