"""Requests that are here now, by the client's id, so that Abort finds them wherever they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from router.faults import Fault
from router.request import failure


class Aborted(Exception):
    """The client's Abort ended a request, and no worker's answer says so."""


@dataclass
class ActiveRequest:
    """One request's time: it ends at its deadline, or when it is ended before."""

    _limit: asyncio.Timeout
    # What it ends with, if not with its deadline.
    why: Exception | None = None
    # How many attempts at workers are made for it now.
    attempts: int = 0

    def abort(self) -> None:
        """Ends the request at once, as its client has asked."""
        self.end(Aborted())

    def end(self, why: Exception) -> None:
        """Ends the request at once, with `why`; one that is about to end does so as it would."""
        if not self._limit.expired():
            self.why = why
            self._limit.reschedule(asyncio.get_running_loop().time())


@dataclass
class ActiveRequests:
    """All requests of this process, from their arrival to their end."""

    _by_id: dict[str, list[ActiveRequest]] = field(default_factory=dict)

    def of(self, request_id: str) -> list[ActiveRequest]:
        """The requests that came under this id; two clients may have had the same idea."""
        return list(self._by_id.get(request_id, ()))

    def ids(self) -> set[str]:
        """The ids under which there are requests."""
        return set(self._by_id)

    def end_all(self, why: Callable[[], Fault]) -> None:
        """Ends every request at once, each with a fault of its own."""
        for requests in self._by_id.values():
            for request in requests:
                request.end(why())

    @asynccontextmanager
    async def running(
        self, request_id: str, deadline: float, late: Callable[[], Fault] | None = None
    ) -> AsyncIterator[ActiveRequest]:
        """The life of one request, until `deadline` (loop time).

        Raises what `late` says when the time is over, `Fault` WORKER_TIMEOUT
        by default, `Aborted` when it was aborted, or what it was ended with.
        """
        limit = asyncio.timeout_at(deadline)
        request = ActiveRequest(limit)
        self._by_id.setdefault(request_id, []).append(request)
        try:
            async with limit:
                yield request
        except TimeoutError:
            if not limit.expired():
                raise  # of something within
            raise request.why or (late or too_late)() from None
        finally:
            present = self._by_id[request_id]
            present.remove(request)
            if not present:
                del self._by_id[request_id]


def too_late() -> Fault:
    """The longest life of a request is over."""
    return failure.out_of_time("the request's time is over").fault
