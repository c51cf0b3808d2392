"""The bounded pool of threads in which bytes become pixels.

Decoders, base64 and hashing release the interpreter lock or hold it only for
moments, so threads are enough; as many as there are cores, because more would
only take turns.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from router.media.budget import Reservation

P = ParamSpec("P")
T = TypeVar("T")

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


class PixelPool:
    """Runs blocking pixel work off the event loop."""

    def __init__(self, threads: int = 0) -> None:
        self._executor = ThreadPoolExecutor(threads or cores(), thread_name_prefix="pixels")

    async def run(
        self,
        held: Iterable[Reservation],
        work: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Runs `work` in a thread; `held` stays reserved until the thread is done with it.

        A cancel takes work that has not begun out of the queue. Work that has
        begun cannot be stopped: the caller goes on at once, the memory stays
        accounted for until the thread really ends.
        """
        loop = asyncio.get_running_loop()
        # With the caller's context: what the work measures belongs to the caller's trace.
        context = contextvars.copy_context()
        future: Future[T] = self._executor.submit(context.run, partial(work, *args, **kwargs))
        kept = [reservation.hold() for reservation in held]

        def let_go() -> None:
            for reservation in kept:
                reservation.release()

        future.add_done_callback(lambda _: loop.call_soon_threadsafe(let_go))
        return await asyncio.wrap_future(future)

    def drop(self) -> None:
        """Takes no more work and drops what has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """Drops what has not begun and waits for the rest."""
        self.drop()
        await asyncio.to_thread(self._executor.shutdown)


def cores() -> int:
    """The cores this process may use: its affinity, and its cgroup's quota where it has one."""
    usable = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_MAX.read_text().split()
        if quota != "max":
            usable = min(usable, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        # No cgroup v2 here: the affinity alone decides.
        return usable
    return usable
