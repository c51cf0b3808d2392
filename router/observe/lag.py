"""How late the event loop is: the first sign of work that does not belong on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_INTERVAL = 0.1


async def watch_loop_lag(observe: Callable[[float], None]) -> None:
    """Reports, ten times a second until cancelled, by how many seconds a sleep overran."""
    while True:
        due = time.monotonic() + _INTERVAL
        await asyncio.sleep(_INTERVAL)
        observe(max(0.0, time.monotonic() - due))
