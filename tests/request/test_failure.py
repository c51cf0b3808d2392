"""What the end of a call means: for the client, the worker's breaker, and a retry."""

from __future__ import annotations

import grpc
import pytest

from router.faults import Reason
from router.fleet.breaker import CallResult
from router.request import failure
from router.request.failure import Again, Media, PassThrough, of_call

Code = grpc.StatusCode
NEUTRAL, FAILURE = CallResult.NEUTRAL, CallResult.FAILURE
CLIENT_FAULTS = [
    Code.INVALID_ARGUMENT,
    Code.OUT_OF_RANGE,
    Code.FAILED_PRECONDITION,
    Code.NOT_FOUND,
    Code.ALREADY_EXISTS,
    Code.UNIMPLEMENTED,
]


def ended(code: Code, details: str = "because", **trailers: str) -> grpc.aio.AioRpcError:
    named = {key.replace("_", "-"): value for key, value in trailers.items()}
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*named.items()), details
    )


@pytest.mark.parametrize(
    ("code", "details", "reason", "result", "again"),
    [
        (Code.UNAVAILABLE, "failed to connect", "WORKER_UNAVAILABLE", FAILURE, Again.YES),
        (Code.UNAVAILABLE, "", "WORKER_UNAVAILABLE", FAILURE, Again.YES),
        (Code.UNAVAILABLE, "worker is saturated: 64", "WORKER_SATURATED", NEUTRAL, Again.YES),
        (Code.RESOURCE_EXHAUSTED, "no blocks", "WORKER_SATURATED", NEUTRAL, Again.YES),
        (
            Code.RESOURCE_EXHAUSTED,
            "CLIENT: Received message larger than max (9 vs. 8)",
            "MESSAGE_TOO_LARGE",
            NEUTRAL,
            Again.NO,
        ),
        (Code.INTERNAL, "x", "WORKER_INTERNAL", FAILURE, Again.ONCE),
        (Code.UNKNOWN, "x", "WORKER_INTERNAL", FAILURE, Again.ONCE),
        (Code.DATA_LOSS, "x", "WORKER_INTERNAL", FAILURE, Again.ONCE),
        (Code.CANCELLED, "x", "WORKER_UNAVAILABLE", FAILURE, Again.YES),
        (Code.ABORTED, "x", "WORKER_UNAVAILABLE", FAILURE, Again.YES),
        (Code.UNAUTHENTICATED, "no token", "WORKER_UNAVAILABLE", FAILURE, Again.YES),
        (Code.PERMISSION_DENIED, "RBAC: denied", "WORKER_UNAVAILABLE", FAILURE, Again.YES),
        (Code.DEADLINE_EXCEEDED, "x", "WORKER_TIMEOUT", NEUTRAL, Again.NO),
    ],
)
def test_before_the_first_output(
    code: Code, details: str, reason: str, result: CallResult, again: Again
) -> None:
    why = of_call(ended(code, details), started=False, media=Media.NONE)
    assert (why.fault.reason.value, why.result, why.again) == (reason, result, again)
    assert details not in why.fault.message or not details


@pytest.mark.parametrize("code", [c for c in Code if c is not Code.OK])
def test_after_the_first_output_there_is_no_other_attempt(code: Code) -> None:
    why = of_call(ended(code), started=True, media=Media.NONE)
    assert why.again is Again.NO
    if code in CLIENT_FAULTS:
        assert isinstance(why.fault, PassThrough)
        assert why.result is NEUTRAL
    elif code is Code.DEADLINE_EXCEEDED:
        assert (why.fault.reason, why.result) == (Reason.WORKER_TIMEOUT, NEUTRAL)
    else:
        assert (why.fault.reason, why.result) == (Reason.WORKER_STREAM_BROKEN, FAILURE)


@pytest.mark.parametrize("code", CLIENT_FAULTS)
@pytest.mark.parametrize("started", [False, True])
def test_a_clients_fault_is_passed_on_as_it_is(code: Code, started: bool) -> None:
    why = of_call(
        ended(code, "temperature must be at least 0"), started=started, media=Media.HOSTED
    )
    assert isinstance(why.fault, PassThrough)
    assert why.fault.code is code
    assert why.fault.message == "temperature must be at least 0"
    assert (why.result, why.again) == (NEUTRAL, Again.NO)


@pytest.mark.parametrize(
    "code", [Code.FAILED_PRECONDITION, Code.UNAVAILABLE, Code.INVALID_ARGUMENT]
)
def test_a_worker_that_lost_what_it_offered_is_read_again_and_another_one_asked(code: Code) -> None:
    error = ended(code, smg_constraint_failed="1")
    why = of_call(error, started=False, media=Media.NONE)
    assert why.reread
    assert (why.fault.reason, why.result) == (Reason.WORKER_UNAVAILABLE, NEUTRAL)
    assert why.again is Again.YES


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [
        ("200", 0.2),
        ("0", 0.0),
        ("-1", -0.001),
        ("soon", -1.0),
        ("1.5", -1.0),
        ("9" * 400, -1.0),
        ("9" * 9000, -1.0),
    ],
)
def test_pushback_is_read_in_milliseconds_and_nonsense_forbids_a_retry(
    sent: str, seconds: float
) -> None:
    error = ended(Code.UNAVAILABLE, grpc_retry_pushback_ms=sent)
    assert of_call(error, started=False, media=Media.NONE).pushback == seconds
    assert of_call(ended(Code.UNAVAILABLE), started=False, media=Media.NONE).pushback is None


@pytest.mark.parametrize(
    ("sent", "told"), [("9000", 9.0), ("0", None), ("-1", None), ("soon", None), (None, None)]
)
def test_what_the_worker_asks_of_us_is_asked_of_the_client(
    sent: str | None, told: float | None
) -> None:
    trailers = {} if sent is None else {"grpc_retry_pushback_ms": sent}
    for code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED):
        why = of_call(ended(code, **trailers), started=False, media=Media.NONE)
        assert why.fault.retry_after == told


def test_a_deadline_that_is_not_ours_is_the_workers_failure() -> None:
    error = ended(Code.DEADLINE_EXCEEDED, "x")
    why = of_call(error, started=False, media=Media.NONE, time_left=5.0)
    assert (why.fault.reason, why.fault.metadata) == (Reason.WORKER_TIMEOUT, {"limit": "worker"})
    assert (why.result, why.again) == (FAILURE, Again.YES)
    why = of_call(error, started=True, media=Media.NONE, time_left=5.0)
    assert (why.fault.reason, why.result) == (Reason.WORKER_STREAM_BROKEN, FAILURE)
    assert why.again is Again.NO


@pytest.mark.parametrize(
    ("code", "details", "about"),
    [
        (
            Code.RESOURCE_EXHAUSTED,
            "SERVER: Received message larger than max (5000004 vs. 4194304)",
            {"size": "5000004", "limit": "4194304"},
        ),
        (Code.RESOURCE_EXHAUSTED, "CLIENT: Sent message larger than max", {}),
        (
            Code.OUT_OF_RANGE,
            "Error, decoded message length too large: found 5000004 bytes, the limit is: "
            "4194304 bytes",
            {"size": "5000004", "limit": "4194304"},
        ),
    ],
)
def test_a_worker_with_a_lower_limit_of_a_message_is_told_in_numbers(
    code: Code, details: str, about: dict[str, str]
) -> None:
    why = of_call(ended(code, details), started=False, media=Media.NONE)
    assert (why.fault.reason, why.fault.metadata) == (Reason.MESSAGE_TOO_LARGE, about)
    assert all(number in why.fault.message for number in about.values())
    assert (why.result, why.again) == (NEUTRAL, Again.NO)


@pytest.mark.parametrize("media", [Media.GIVEN, Media.HOSTED])
def test_what_a_worker_says_of_media_has_the_routers_reason_wherever_they_came_from(
    media: Media,
) -> None:
    error = ended(Code.INVALID_ARGUMENT, "media_refs[0]: failed to load image: truncated")
    why = of_call(error, started=False, media=media)
    assert (why.fault.reason, why.result) == (Reason.MEDIA_DECODE_FAILED, NEUTRAL)
    assert isinstance(of_call(error, started=False, media=Media.NONE).fault, PassThrough)


def test_unavailable_without_a_host_to_blame_is_the_workers_own() -> None:
    why = of_call(ended(Code.UNAVAILABLE, "gave up"), started=False, media=Media.GIVEN)
    assert (why.result, why.again) == (FAILURE, Again.YES)


def test_a_workers_doubtful_unavailable_with_media_of_other_hosts_is_not_its_own() -> None:
    doubtful = of_call(ended(Code.UNAVAILABLE, "gave up"), started=False, media=Media.HOSTED)
    assert (doubtful.result, doubtful.again) == (NEUTRAL, Again.ONCE)
    lost = of_call(ended(Code.UNAVAILABLE, "Socket closed"), started=False, media=Media.HOSTED)
    assert (lost.result, lost.again) == (FAILURE, Again.YES)


@pytest.mark.parametrize("limit", ["connect", "first_output", "idle"])
def test_our_own_limits_are_named_and_are_the_workers_failure(limit: str) -> None:
    for started in (False, True):
        why = failure.timed_out(limit, 2.5, started=started)
        assert why.fault.metadata == {"limit": limit}
        assert "2.5s" in why.fault.message
        assert why.result is FAILURE
        assert why.again is (Again.NO if started else Again.YES)


def test_a_removed_worker_has_not_failed() -> None:
    for started in (False, True):
        why = failure.removed(started=started)
        assert why.result is NEUTRAL
        assert not why.counts_against_budget
        assert why.again is (Again.NO if started else Again.YES)


def test_a_message_that_is_too_large_is_told_in_numbers_and_costs_nobody_anything() -> None:
    why = failure.too_large(11, 10)
    assert why.fault.metadata == {"size": "11", "limit": "10"}
    assert "11" in why.fault.message and "10" in why.fault.message
    assert (why.result, why.again, why.counts_against_budget) == (NEUTRAL, Again.NO, False)
