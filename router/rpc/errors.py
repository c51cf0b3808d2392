"""The error table: what each reason means on the wire.

A status code, `google.rpc.ErrorInfo` in the status details, and
`google.rpc.RetryInfo` where waiting can help.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from structlog.typing import FilteringBoundLogger

from router.faults import Fault, Reason
from router.request.disagg import LegFault
from router.request.failure import PassThrough

Code = grpc.StatusCode

DOMAIN = "mmrouter"
STATUS_DETAILS = "grpc-status-details-bin"
# The most seconds that a google.protobuf.Duration holds.
_LONGEST_DELAY = 315_576_000_000


@dataclass(frozen=True)
class Row:
    """`retry_after` (seconds) is sent as RetryInfo; None where a retry cannot help.

    `outcome` is how the request is counted.
    """

    code: grpc.StatusCode
    outcome: str = "client_fault"
    retry_after: float | None = None


_CLIENT = Row(Code.INVALID_ARGUMENT)

TABLE: dict[Reason, Row] = {
    Reason.UNAUTHENTICATED: Row(Code.UNAUTHENTICATED),
    Reason.INVALID_REQUEST: _CLIENT,
    Reason.PROMPT_TOO_LONG: _CLIENT,
    Reason.ANCHOR_MISMATCH: _CLIENT,
    Reason.MALFORMED_TENSORS: _CLIENT,
    Reason.TOO_MANY_MEDIA_ITEMS: _CLIENT,
    Reason.MEDIA_ITEM_OVER_ENCODER_BUDGET: _CLIENT,
    Reason.MEDIA_URL_INVALID: _CLIENT,
    Reason.MEDIA_SCHEME_UNSUPPORTED: _CLIENT,
    Reason.MEDIA_HOST_FORBIDDEN: _CLIENT,
    Reason.MEDIA_DECODE_FAILED: _CLIENT,
    Reason.MEDIA_FORMAT_UNSUPPORTED: _CLIENT,
    Reason.MEDIA_TOO_LARGE: _CLIENT,
    Reason.MEDIA_ASPECT_RATIO: _CLIENT,
    Reason.MEDIA_NOT_FOUND: _CLIENT,
    Reason.MEDIA_FETCH_FAILED: Row(Code.UNAVAILABLE, "unavailable", 1.0),
    Reason.MEDIA_FETCH_TIMEOUT: Row(Code.DEADLINE_EXCEEDED, "unavailable", 1.0),
    Reason.MEDIA_REF_TOO_LARGE: _CLIENT,
    Reason.MEDIA_REF_SCHEME_NOT_ACCEPTED: Row(Code.FAILED_PRECONDITION),
    Reason.MEDIA_BUDGET_FULL: Row(Code.RESOURCE_EXHAUSTED, "overloaded", 1.0),
    Reason.FILE_FORBIDDEN: Row(Code.PERMISSION_DENIED),
    Reason.MULTIMODAL_HINT_UNSUPPORTED_IN_WORKER_MODE: _CLIENT,
    Reason.MULTIMODAL_UNSUPPORTED_PART: _CLIENT,
    Reason.MULTIMODAL_WORKER_PROCESSING_UNSUPPORTED_MODEL: _CLIENT,
    Reason.MULTIMODAL_NOT_SUPPORTED: _CLIENT,
    Reason.MODEL_NOT_FOUND: Row(Code.NOT_FOUND),
    Reason.MODEL_REQUIRED: _CLIENT,
    Reason.NO_MEDIA_REF_CAPABLE_WORKER: Row(Code.UNAVAILABLE, "unavailable"),
    Reason.NO_AVAILABLE_WORKER: Row(Code.UNAVAILABLE, "unavailable", 1.0),
    Reason.NO_COMPATIBLE_PAIR: Row(Code.UNAVAILABLE, "unavailable"),
    Reason.OVERLOADED: Row(Code.RESOURCE_EXHAUSTED, "overloaded", 1.0),
    Reason.ADMISSION_FULL: Row(Code.RESOURCE_EXHAUSTED, "overloaded", 1.0),
    Reason.MESSAGE_TOO_LARGE: Row(Code.RESOURCE_EXHAUSTED),
    Reason.WORKER_UNAVAILABLE: Row(Code.UNAVAILABLE, "worker_failed", 1.0),
    Reason.WORKER_SATURATED: Row(Code.UNAVAILABLE, "overloaded", 1.0),
    Reason.WORKER_INTERNAL: Row(Code.INTERNAL, "worker_failed"),
    Reason.WORKER_STREAM_BROKEN: Row(Code.UNAVAILABLE, "worker_failed"),
    Reason.WORKER_TIMEOUT: Row(Code.DEADLINE_EXCEEDED, "worker_failed", 1.0),
    Reason.LEG_FAILED: Row(Code.UNAVAILABLE, "worker_failed"),
    Reason.DRAINING: Row(Code.UNAVAILABLE, "unavailable", 1.0),
    Reason.TRANSFER_PARAMS_FORBIDDEN: Row(Code.PERMISSION_DENIED),
    Reason.UNIMPLEMENTED: Row(Code.UNIMPLEMENTED),
    Reason.INTERNAL: Row(Code.INTERNAL, "internal"),
}


@dataclass(frozen=True)
class WireError:
    """A fault as gRPC sends it. `outcome` and `reason` are how it is counted."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]
    outcome: str
    reason: str


def wire_error(fault: Fault) -> WireError:
    """The status, message and trailers of a fault."""
    if isinstance(fault, PassThrough):
        # A worker's own answer: status and message stay as they are.
        return WireError(fault.code, fault.message, (), "client_fault", "worker_refused")
    # A leg fails with the status of what happened to it.
    row = TABLE[fault.cause.reason if isinstance(fault, LegFault) else fault.reason]
    retry_after = fault.retry_after if fault.retry_after is not None else row.retry_after
    details = [
        error_details_pb2.ErrorInfo(
            reason=fault.reason.value, domain=DOMAIN, metadata=fault.metadata
        )
    ]
    packed = [_pack(info) for info in details]
    if row.retry_after is not None and retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(min(retry_after, _LONGEST_DELAY) * 1e9))
        packed.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    status = status_pb2.Status(code=row.code.value[0], message=fault.message, details=packed)
    return WireError(
        row.code,
        fault.message,
        ((STATUS_DETAILS, status.SerializeToString()),),
        row.outcome,
        fault.reason.name.lower(),
    )


def internal(log: FilteringBoundLogger, error: Exception) -> Fault:
    """What a client is told of a fault of our own, which goes into the log."""
    log.error("internal_error", exc_info=error)
    return Fault(Reason.INTERNAL, "the router failed internally; its log has the request id")


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
