"""What a failed attempt means: for the client, for the worker, for a retry."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

import grpc

from router.faults import Fault, Reason
from router.fleet.breaker import CallResult
from router.request.worker_media import media_fault, presentable

Code = grpc.StatusCode

CONSTRAINT_FAILED = "smg-constraint-failed"
PUSHBACK = "grpc-retry-pushback-ms"

# Answers to what the client asked for: the same everywhere, and no sign of ill health.
_CLIENT_FAULTS = frozenset(
    {
        Code.INVALID_ARGUMENT,
        Code.OUT_OF_RANGE,
        Code.FAILED_PRECONDITION,
        Code.NOT_FOUND,
        Code.ALREADY_EXISTS,
        Code.UNIMPLEMENTED,
    }
)
# How grpc words the loss of a connection, as against an answer of the worker's own.
_TRANSPORT = re.compile(
    r"failed to connect|stream removed|socket closed|connection (reset|refused|closed)|"
    r"recvmsg|sendmsg|goaway|keepalive|end of tcp stream|broken pipe|channel closed",
    re.IGNORECASE,
)
# Of grpc's C core and of tonic; the numbers are the message's size and the limit.
_TOO_LARGE = re.compile(
    r"larger than max(?: \((\d+) vs\. (\d+)\))?|"
    r"decoded message length too large(?:: found (\d+) bytes, the limit is: (\d+) bytes)?",
    re.IGNORECASE,
)
_SATURATED = re.compile(r"saturated", re.IGNORECASE)


# Seconds by which the timers of a call's two sides may differ.
_TIMER_SLACK = 0.1


class Media(Enum):
    """Which media a worker has to read for a request."""

    NONE = "none"
    # They are at hand: in the request itself, or in files.
    GIVEN = "given"
    # They have to be fetched from hosts, which may fail by themselves.
    HOSTED = "hosted"


class Again(Enum):
    """Whether another worker may help."""

    NO = "no"
    YES = "yes"
    # As YES, but only for the first time that it happens to a request.
    ONCE = "once"


@dataclass(frozen=True)
class Failure:
    """One attempt's end. `fault` is for the client if this was the last attempt.

    `pushback` is the worker's own wish for the pause before a retry, seconds;
    negative forbids one. `reread` asks for its capability to be read again.
    """

    fault: Fault
    result: CallResult
    again: Again
    pushback: float | None = None
    reread: bool = False
    counts_against_budget: bool = True


class PassThrough(Fault):
    """A worker's answer that goes to the client, rid of what might be a secret."""

    def __init__(self, code: Code, details: str) -> None:
        super().__init__(Reason.INVALID_REQUEST, presentable(details))
        self.code = code


def of_call(
    error: grpc.aio.AioRpcError, *, started: bool, media: Media, time_left: float = 0.0
) -> Failure:
    """Classifies a call that ended with a status.

    `started`: output has gone to the client. `media`: what the worker had to
    read; where it had to fetch, its UNAVAILABLE may be the media host's.
    `time_left` are the seconds that the call still had.
    """
    failed = _of_call(error, started=started, media=media, time_left=time_left)
    if failed.pushback is not None and failed.pushback > 0:
        # What the worker asked of us is asked of the client, if this was the last attempt.
        failed.fault.retry_after = failed.pushback
    return failed


def _of_call(
    error: grpc.aio.AioRpcError, *, started: bool, media: Media, time_left: float
) -> Failure:
    code, details = error.code(), error.details() or ""
    trailers = dict(error.trailing_metadata() or ())
    if started:
        if code in _CLIENT_FAULTS:
            return Failure(PassThrough(code, details), CallResult.NEUTRAL, Again.NO)
        if code is Code.DEADLINE_EXCEEDED and time_left <= _TIMER_SLACK:
            return out_of_time("the request's time was over before the worker's stream was")
        return broken("the worker's stream broke off after its first output")
    pushback = _pushback(trailers.get(PUSHBACK))
    if CONSTRAINT_FAILED in trailers:
        return Failure(
            Fault(Reason.WORKER_UNAVAILABLE, "the worker no longer takes what it offered"),
            CallResult.NEUTRAL,
            Again.YES,
            pushback,
            reread=True,
        )
    if media is not Media.NONE and (foreign := media_fault(code, details)):
        # Another worker may have another way to a host, but none to a picture that is broken.
        again = Again.ONCE if code is Code.UNAVAILABLE else Again.NO
        return Failure(foreign, CallResult.NEUTRAL, again, pushback)
    if code in (Code.RESOURCE_EXHAUSTED, Code.OUT_OF_RANGE) and (
        too_much := _TOO_LARGE.search(details)
    ):
        return _refused_for_size(too_much)
    if code in _CLIENT_FAULTS:
        return Failure(PassThrough(code, details), CallResult.NEUTRAL, Again.NO)
    match code:
        case Code.RESOURCE_EXHAUSTED:
            return _saturated(pushback)
        case Code.UNAVAILABLE if _SATURATED.search(details):
            return _saturated(pushback)
        case Code.UNAVAILABLE:
            doubtful = media is Media.HOSTED and not _TRANSPORT.search(details)
            return Failure(
                Fault(Reason.WORKER_UNAVAILABLE, "the worker could not be reached or gave up"),
                CallResult.NEUTRAL if doubtful else CallResult.FAILURE,
                Again.ONCE if doubtful else Again.YES,
                pushback,
            )
        case Code.DEADLINE_EXCEEDED if time_left <= _TIMER_SLACK:
            return out_of_time("the worker did not answer within the deadline")
        case Code.DEADLINE_EXCEEDED:
            # A limit of its own, or of something before it.
            return Failure(
                Fault(
                    Reason.WORKER_TIMEOUT,
                    "the worker gave up before the request's time was over",
                    metadata={"limit": "worker"},
                ),
                CallResult.FAILURE,
                Again.YES,
                pushback,
            )
        case Code.UNAUTHENTICATED | Code.PERMISSION_DENIED:
            # The router's own credentials, or a mesh between the two: no client can mend it.
            return _unavailable("the worker does not let the router in", pushback)
        case Code.CANCELLED | Code.ABORTED:
            return _unavailable("the worker ended the call", pushback)
        case _:
            return Failure(
                Fault(Reason.WORKER_INTERNAL, "the worker failed internally"),
                CallResult.FAILURE,
                Again.ONCE,
                pushback,
            )


def broken(message: str) -> Failure:
    """A stream that cannot be continued."""
    return Failure(Fault(Reason.WORKER_STREAM_BROKEN, message), CallResult.FAILURE, Again.NO)


def removed(*, started: bool) -> Failure:
    """The router took the worker out of the fleet, and with it the call."""
    if started:
        gone = Fault(Reason.WORKER_STREAM_BROKEN, "the worker was removed in mid-stream")
    else:
        gone = Fault(Reason.WORKER_UNAVAILABLE, "the worker was removed")
    return Failure(
        gone,
        CallResult.NEUTRAL,
        Again.NO if started else Again.YES,
        counts_against_budget=False,
    )


def no_handoff(why: str) -> Failure:
    """A prefill leg whose stream was whole and left nothing for the decode leg."""
    return Failure(
        Fault(
            Reason.LEG_FAILED,
            f"the prefill worker {why}",
            metadata={"leg": "prefill", "cause": "no_handoff"},
        ),
        CallResult.FAILURE,
        Again.YES,
    )


def no_identity() -> Failure:
    """A prefill leg that does not say what the media were that it processed."""
    return Failure(
        Fault(
            Reason.LEG_FAILED,
            "the prefill worker returned no identity of every media item",
            metadata={"leg": "prefill", "cause": "no_media_identity"},
        ),
        CallResult.NEUTRAL,
        Again.YES,
    )


def movable(failure: Failure) -> Failure:
    """The same failure for a stream that can go on at another worker."""
    return replace(failure, again=Again.YES)


def incomplete(*, started: bool) -> Failure:
    """A stream that ended OK without all of its Completes."""
    return Failure(
        Fault(Reason.WORKER_STREAM_BROKEN, "the worker's stream ended without completing"),
        CallResult.FAILURE,
        Again.NO if started else Again.YES,
    )


def unreadable(message: str = "GenerateResponse", *, started: bool) -> Failure:
    """An answer with bytes in it that are no such message of the contract."""
    return Failure(
        Fault(Reason.WORKER_STREAM_BROKEN, f"the worker sent bytes that are no {message}"),
        CallResult.FAILURE,
        Again.NO if started else Again.YES,
    )


def too_large(size: int, limit: int) -> Failure:
    """A request that is over the limit of a message before it is sent."""
    return Failure(
        Fault(
            Reason.MESSAGE_TOO_LARGE,
            f"the prepared request has {size} bytes, the limit of a message is {limit}",
            metadata={"size": str(size), "limit": str(limit)},
        ),
        CallResult.NEUTRAL,
        Again.NO,
        counts_against_budget=False,
    )


def timed_out(limit: str, seconds: float, *, started: bool) -> Failure:
    """One of our own limits (`connect`, `first_output`, `idle`) ran out."""
    return Failure(
        Fault(
            Reason.WORKER_TIMEOUT,
            f"the worker exceeded the {limit.replace('_', ' ')} limit of {seconds:g}s",
            metadata={"limit": limit},
        ),
        CallResult.FAILURE,
        Again.NO if started else Again.YES,
    )


def out_of_time(message: str) -> Failure:
    """The client's deadline or the longest life of a request is over."""
    return Failure(
        Fault(Reason.WORKER_TIMEOUT, message, metadata={"limit": "total"}),
        CallResult.NEUTRAL,
        Again.NO,
    )


def _refused_for_size(match: re.Match[str]) -> Failure:
    """A worker's own limit of a message is lower than ours."""
    numbers = [number for number in match.groups() if number is not None]
    size, limit = numbers or ("", "")
    told = f": {size} bytes, its limit is {limit}" if numbers else ""
    return Failure(
        Fault(
            Reason.MESSAGE_TOO_LARGE,
            f"the request is larger than the worker accepts{told}",
            metadata={"size": size, "limit": limit} if numbers else None,
        ),
        CallResult.NEUTRAL,
        Again.NO,
    )


def _unavailable(message: str, pushback: float | None) -> Failure:
    fault = Fault(Reason.WORKER_UNAVAILABLE, message)
    return Failure(fault, CallResult.FAILURE, Again.YES, pushback)


def _saturated(pushback: float | None) -> Failure:
    return Failure(
        Fault(Reason.WORKER_SATURATED, "the worker is saturated"),
        CallResult.NEUTRAL,
        Again.YES,
        pushback,
    )


def _pushback(value: str | bytes | None) -> float | None:
    if value is None:
        return None
    try:
        return int(value) / 1000
    except (ValueError, OverflowError):
        return -1.0  # gRPC: what cannot be read means "do not retry"
