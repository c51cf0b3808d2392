"""Relaying a stream: what is passed on, what counts as whole, when silence is too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
import pytest

from router.faults import Reason
from router.fleet.breaker import CallResult
from router.request import relay
from router.request.failure import Again, Media
from router.request.relay import AttemptFailed, ClientGone, Limits, Progress, stream, tell
from router.wire import engine
from tests.request.test_failure import ended

Step = bytes | float | Exception


def chunk(*ids: int, index: int = 0) -> bytes:
    part = engine.GenerateStreamChunk(token_ids=ids, index=index)
    return engine.GenerateResponse(chunk=part).SerializeToString()


def complete(index: int = 0, **fields: Any) -> bytes:
    part = engine.GenerateComplete(index=index, **fields)
    return engine.GenerateResponse(complete=part).SerializeToString()


class Call:
    """A worker's call that says these messages, with these pauses (seconds), and then ends."""

    def __init__(self, *steps: Step) -> None:
        self._steps = steps
        self._cancelled = asyncio.Event()
        self.cancels = 0
        self.time_left: float | None = None

    def time_remaining(self) -> float | None:
        return self.time_left

    def cancel(self) -> bool:
        self.cancels += 1
        self._cancelled.set()
        return True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for step in self._steps:
            if self._cancelled.is_set():
                raise asyncio.CancelledError
            if isinstance(step, Exception):
                raise step
            if isinstance(step, bytes):
                yield step
                continue
            try:
                async with asyncio.timeout(step):
                    await self._cancelled.wait()
            except TimeoutError:
                continue
            raise asyncio.CancelledError


FOREVER = 1000.0
PATIENT = Limits(first_output=60, idle=60)


async def relayed(
    call: Call,
    *,
    choices: int = 1,
    limits: Limits = PATIENT,
    write: Callable[[bytes], Any] | None = None,
    progress: Progress | None = None,
) -> list[bytes]:
    sent: list[bytes] = []

    async def keep(message: bytes) -> None:
        sent.append(message)

    await stream(
        call,  # type: ignore[arg-type]
        write or keep,
        choices=choices,
        limits=limits,
        progress=progress or Progress(),
        media=Media.NONE,
        on_first=lambda: None,
    )
    return sent


async def failed(call: Call, **settings: Any) -> str:
    """The reason, and for a limit its name, with which the relay ends."""
    with pytest.raises(AttemptFailed) as error:
        await relayed(call, **settings)
    fault = error.value.why.fault
    return fault.metadata.get("limit", fault.reason.value)


async def test_messages_pass_unchanged_and_in_order() -> None:
    messages = [chunk(1), chunk(2, 3), complete(output_ids=[3]), b"\xba\x3e\x01x"]
    call = Call(*messages)
    assert await relayed(call) == messages
    assert call.cancels, "the call is over whatever happens"


async def test_a_stream_is_whole_with_a_complete_for_every_choice() -> None:
    assert await relayed(Call(complete(1), complete(0)), choices=2)
    assert await failed(Call(complete(0)), choices=2) == "WORKER_STREAM_BROKEN"
    assert await failed(Call(complete(0), complete(0)), choices=2) == "WORKER_STREAM_BROKEN"
    assert await failed(Call(chunk(1))) == "WORKER_STREAM_BROKEN"
    assert await failed(Call()) == "WORKER_STREAM_BROKEN"


async def test_a_choice_that_nobody_asked_for_completes_none_that_was() -> None:
    assert await failed(Call(chunk(1), complete(5))) == "WORKER_STREAM_BROKEN"
    assert await failed(Call(complete(0), complete(2)), choices=2) == "WORKER_STREAM_BROKEN"
    assert await failed(Call(complete(1), ended(grpc.StatusCode.UNAVAILABLE)))
    assert len(await relayed(Call(complete(1), complete(0)))) == 2


def test_thousands_of_choices_are_gone_through_once_and_not_for_each_complete() -> None:
    walks = []

    class Noting(set[int]):
        def issuperset(self, other: Iterable[Any]) -> bool:
            walks.append(len(self))
            return super().issuperset(other)

    progress = Progress(completes=Noting())
    for index in range(3000):
        assert not progress.whole(3000)
        progress.completes.add(index)
    assert progress.whole(3000)
    assert walks == [3000]


async def test_a_choice_that_is_over_is_told_once() -> None:
    many = (complete(0), complete(0, output_ids=[1]), chunk(2), complete(1), complete(0), chunk(3))
    progress = Progress()
    # Of a choice that may still go on, chunks pass.
    wanted = [complete(0), chunk(2), complete(1)]
    assert await relayed(Call(*many), choices=2, progress=progress) == wanted
    assert (progress.messages, progress.output_tokens) == (3, 1)


async def test_an_error_after_the_last_complete_takes_nothing_away() -> None:
    assert await relayed(Call(chunk(1), complete(), ended(grpc.StatusCode.UNAVAILABLE)))


async def test_what_completes_say_is_noted() -> None:
    progress = Progress()
    call = Call(
        complete(0, prompt_tokens=7, cached_tokens=3, finish_reason="stop"),
        complete(1, prompt_tokens=7, finish_reason="length"),
    )
    await relayed(call, choices=2, progress=progress)
    assert progress.completes == {0, 1}
    assert (progress.messages, progress.prompt_tokens) == (2, 7)


async def test_silence_before_the_first_output_has_its_own_limit() -> None:
    limits = Limits(first_output=0.05, idle=60)
    assert await failed(Call(FOREVER), limits=limits) == "first_output"
    late = Limits(first_output=60, idle=0.02)
    assert await relayed(Call(0.1, complete()), limits=late)


async def test_silence_between_messages_has_the_idle_limit_whenever_it_begins() -> None:
    for first_output in (0.02, 60.0):
        limits = Limits(first_output=first_output, idle=0.05)
        assert await failed(Call(chunk(1), FOREVER), limits=limits) == "idle"
        patient = Limits(first_output=first_output, idle=60)
        assert await relayed(Call(chunk(1), 0.05, chunk(2), 0.05, complete()), limits=patient)


async def test_a_client_that_is_slow_to_read_is_no_silent_worker() -> None:
    limits = Limits(first_output=60, idle=2)
    pauses = [2.2, 0.0]

    async def slowly(_: bytes) -> None:
        await asyncio.sleep(pauses.pop(0))

    # What came while the client was slow does not count as silence afterwards either.
    await relayed(Call(chunk(1), 0.1, complete()), limits=limits, write=slowly)


async def test_a_client_that_leaves_cancels_the_worker() -> None:
    call = Call(chunk(1), FOREVER)
    relaying = asyncio.create_task(relayed(call))
    await asyncio.sleep(0.01)
    relaying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await relaying
    assert call.cancels


async def test_a_call_that_is_cancelled_under_us_is_a_removed_worker() -> None:
    call = Call(chunk(1), FOREVER)
    relaying = asyncio.create_task(relayed(call))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(AttemptFailed) as error:
        await relaying
    assert error.value.why.fault.reason.value == "WORKER_STREAM_BROKEN"
    assert error.value.why.result.value == "neutral"


@pytest.mark.parametrize("before", [(), (chunk(1),)])
async def test_a_worker_that_is_silent_to_everybody_is_given_up(before: tuple[bytes, ...]) -> None:
    silence = 0.0
    limits = Limits(first_output=60, idle=60, silence=0.05)
    waiting = asyncio.create_task(
        failed(
            Call(*before, FOREVER),
            limits=limits,
            progress=Progress(worker_silence=lambda: silence),
        )
    )
    # While others hear of the worker, only its own limits count.
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    silence = 0.06
    assert await asyncio.wait_for(waiting, 10) == "silence"


async def test_a_write_that_fails_means_that_the_client_is_gone() -> None:
    async def write(_: bytes) -> None:
        raise grpc.aio.InternalError

    call = Call(chunk(1), FOREVER)
    with pytest.raises(ClientGone):
        await relayed(call, write=write)
    assert call.cancels
    with pytest.raises(ClientGone):
        await tell(write, complete())


async def test_a_read_that_fails_by_itself_is_not_blamed_on_the_client() -> None:
    call = Call(chunk(1), grpc.aio.InternalError())
    with pytest.raises(grpc.aio.InternalError):
        await relayed(call)
    assert call.cancels


GARBAGE = (
    b"\x07 this is no message",
    # These begin as chunks do.
    b"\n",
    b"\n\x05\n",
    b"\n\x08\n\x7f\x01\x02\x03",
    b"\n\xff\xff\xff\xff\xff\xff",
)


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_bytes_that_are_no_message_are_the_workers_failure(garbage: bytes) -> None:
    call = Call(garbage, FOREVER)
    with pytest.raises(AttemptFailed) as first:
        await relayed(call)
    assert first.value.why.fault.reason is Reason.WORKER_STREAM_BROKEN
    assert first.value.why.result is CallResult.FAILURE
    assert first.value.why.again is Again.YES
    assert call.cancels
    later = Call(chunk(1), garbage, FOREVER)
    with pytest.raises(AttemptFailed) as second:
        await relayed(later)
    assert second.value.why.result is CallResult.FAILURE
    assert second.value.why.again is Again.NO
    assert later.cancels


async def test_a_stream_that_is_whole_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_CLOSING", 0.05)
    call = Call(chunk(1), complete(), FOREVER)
    async with asyncio.timeout(10):
        assert await relayed(call) == [chunk(1), complete()]
    assert call.cancels
