"""How many requests are at work at once, and how many may wait for a place."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from router.faults import Fault, Reason


class Admission:
    """A bound on concurrent requests with a first-come queue of bounded length and wait.

    `queue_timeout` is in seconds. `on_wait` hears how long each admitted
    request waited.
    """

    def __init__(
        self,
        max_concurrent: int,
        queue_size: int,
        queue_timeout: float,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self._max_concurrent = max_concurrent
        self._queue_size = queue_size
        self._queue_timeout = queue_timeout
        self._on_wait = on_wait
        self._queue: deque[asyncio.Future[None]] = deque()
        self.active = 0
        self.draining = False
        # Set while no request is at work.
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def limit(self) -> int:
        """How many requests may be at work at once."""
        return self._max_concurrent

    def stop(self) -> None:
        """Refuses every new request, and those that wait, as DRAINING."""
        self.draining = True
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_exception(draining())

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Holds one place. Raises `Fault` ADMISSION_FULL or DRAINING."""
        if self.draining:
            raise draining()
        if self.active >= self._max_concurrent:
            await self._wait()  # the place is handed over
        else:
            self.active += 1
            self.idle.clear()
            if self._on_wait:
                self._on_wait(0.0)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self) -> None:
        if len(self._queue) >= self._queue_size:
            raise self._full(
                "the router is at its limit of concurrent requests and its queue is full"
            )
        loop = asyncio.get_running_loop()
        began = loop.time()
        waiter: asyncio.Future[None] = loop.create_future()
        self._queue.append(waiter)
        try:
            async with asyncio.timeout(self._queue_timeout):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leave()  # the place came in the very moment of giving up
            elif waiter in self._queue:
                self._queue.remove(waiter)
            if isinstance(error, TimeoutError):
                raise self._full("no place became free in time") from None
            raise
        if self._on_wait:
            self._on_wait(loop.time() - began)

    def _leave(self) -> None:
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.active -= 1
        if not self.active:
            self.idle.set()

    def _full(self, message: str) -> Fault:
        return Fault(
            Reason.ADMISSION_FULL,
            message,
            metadata={
                "max_concurrent": str(self._max_concurrent),
                "queue_size": str(self._queue_size),
            },
        )


def draining(message: str = "the router is stopping") -> Fault:
    """A request that another router must serve."""
    return Fault(Reason.DRAINING, message)
