"""A request's time: it ends once, with what ended it first."""

from __future__ import annotations

import asyncio

import pytest

from router.faults import Fault, Reason
from router.request.active import Aborted, ActiveRequests
from router.request.admission import draining


def later(seconds: float = 60.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def ended_by(requests: ActiveRequests, *causes: Exception) -> BaseException | None:
    """How a request ends that is ended by each of `causes` while it takes its time to end."""
    ending = asyncio.Event()

    async def serve() -> None:
        async with requests.running("a", later()):
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await asyncio.sleep(0)

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    for cause in causes:
        (request,) = requests.of("a")
        request.end(cause)
        await ending.wait()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert not requests.ids()
    return outcome


async def test_a_request_that_is_ended_ends_with_the_cause() -> None:
    assert isinstance(await ended_by(ActiveRequests(), Aborted()), Aborted)


async def test_a_request_that_is_ending_is_not_ended_anew() -> None:
    outcome = await ended_by(ActiveRequests(), Aborted(), draining(), Aborted())
    assert isinstance(outcome, Aborted)


async def test_a_request_whose_time_is_over_cannot_be_ended_otherwise() -> None:
    requests = ActiveRequests()
    with pytest.raises(Fault) as failed:
        async with requests.running("a", later(0)):
            try:
                await asyncio.Event().wait()
            finally:
                (request,) = requests.of("a")
                request.end(Aborted())
    assert failed.value.reason is Reason.WORKER_TIMEOUT


async def test_a_timeout_of_something_within_is_not_taken_for_the_requests_own() -> None:
    with pytest.raises(TimeoutError, match="of a socket"):
        async with ActiveRequests().running("a", later()):
            raise TimeoutError("of a socket")
