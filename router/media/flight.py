"""Single flight: what several ask for at the same time is made once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0
    landed: bool = False


class SingleFlight(Generic[T]):
    """Runs one task a key, whoever asks.

    The task belongs to nobody in particular: whoever started it may be
    cancelled without harm to the others, and it is cancelled itself only when
    nobody waits any more. `dispose` gets the result once the last who waited
    has left.
    """

    def __init__(self, dispose: Callable[[T], None] | None = None) -> None:
        self._dispose = dispose
        self._flights: dict[Hashable, _Flight[T]] = {}
        self._tasks: set[asyncio.Task[T]] = set()

    def __len__(self) -> int:
        return len(self._flights)

    @asynccontextmanager
    async def join(
        self, key: Hashable, start: Callable[[], Coroutine[Any, Any, T]]
    ) -> AsyncIterator[T]:
        """The result, made by `start` unless it is being made already.

        Inside the block the result is not yet disposed of. Raises what the task
        raises, to everyone who waits.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.create_task(start()))
            self._flights[key] = flight
            self._tasks.add(flight.task)
            flight.task.add_done_callback(lambda _: self._land(key, flight))
        flight.waiters += 1
        try:
            yield await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                self._abandon(key, flight)

    async def close(self) -> None:
        """Cancels what still runs and waits for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _land(self, key: Hashable, flight: _Flight[T]) -> None:
        flight.landed = True
        self._tasks.discard(flight.task)
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.waiters == 0:
            # Everyone left before it ended; its result or error has no taker.
            self._end(flight)

    def _abandon(self, key: Hashable, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            # A later caller must not join a task that is being cancelled.
            del self._flights[key]
        if flight.landed:
            self._end(flight)
        else:
            # Also where it is done but has not landed yet, and this does nothing:
            # the landing disposes of the result, once.
            flight.task.cancel()

    def _end(self, flight: _Flight[T]) -> None:
        if flight.task.cancelled() or flight.task.exception() is not None:
            return
        if self._dispose is not None:
            self._dispose(flight.task.result())
