"""What can go wrong with a request, by name.

Every room raises `Fault` with a `Reason`; `router.rpc.errors` alone knows
which gRPC status and which retry hint each reason means.
"""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """The reasons a client can be told, as `google.rpc.ErrorInfo.reason`."""

    UNAUTHENTICATED = "UNAUTHENTICATED"
    INVALID_REQUEST = "INVALID_REQUEST"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    ANCHOR_MISMATCH = "ANCHOR_MISMATCH"
    MALFORMED_TENSORS = "MALFORMED_TENSORS"
    TOO_MANY_MEDIA_ITEMS = "TOO_MANY_MEDIA_ITEMS"
    MEDIA_ITEM_OVER_ENCODER_BUDGET = "MEDIA_ITEM_OVER_ENCODER_BUDGET"
    MEDIA_URL_INVALID = "MEDIA_URL_INVALID"
    MEDIA_SCHEME_UNSUPPORTED = "MEDIA_SCHEME_UNSUPPORTED"
    MEDIA_HOST_FORBIDDEN = "MEDIA_HOST_FORBIDDEN"
    MEDIA_DECODE_FAILED = "MEDIA_DECODE_FAILED"
    MEDIA_FORMAT_UNSUPPORTED = "MEDIA_FORMAT_UNSUPPORTED"
    MEDIA_TOO_LARGE = "MEDIA_TOO_LARGE"
    MEDIA_ASPECT_RATIO = "MEDIA_ASPECT_RATIO"
    MEDIA_NOT_FOUND = "MEDIA_NOT_FOUND"
    MEDIA_FETCH_FAILED = "MEDIA_FETCH_FAILED"
    MEDIA_FETCH_TIMEOUT = "MEDIA_FETCH_TIMEOUT"
    MEDIA_REF_TOO_LARGE = "MEDIA_REF_TOO_LARGE"
    MEDIA_REF_SCHEME_NOT_ACCEPTED = "MEDIA_REF_SCHEME_NOT_ACCEPTED"
    MEDIA_BUDGET_FULL = "MEDIA_BUDGET_FULL"
    FILE_FORBIDDEN = "FILE_FORBIDDEN"
    MULTIMODAL_HINT_UNSUPPORTED_IN_WORKER_MODE = "MULTIMODAL_HINT_UNSUPPORTED_IN_WORKER_MODE"
    MULTIMODAL_UNSUPPORTED_PART = "MULTIMODAL_UNSUPPORTED_PART"
    MULTIMODAL_WORKER_PROCESSING_UNSUPPORTED_MODEL = (
        "MULTIMODAL_WORKER_PROCESSING_UNSUPPORTED_MODEL"
    )
    MULTIMODAL_NOT_SUPPORTED = "MULTIMODAL_NOT_SUPPORTED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    MODEL_REQUIRED = "MODEL_REQUIRED"
    NO_MEDIA_REF_CAPABLE_WORKER = "NO_MEDIA_REF_CAPABLE_WORKER"
    NO_AVAILABLE_WORKER = "NO_AVAILABLE_WORKER"
    NO_COMPATIBLE_PAIR = "NO_COMPATIBLE_PAIR"
    OVERLOADED = "OVERLOADED"
    ADMISSION_FULL = "ADMISSION_FULL"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    WORKER_UNAVAILABLE = "WORKER_UNAVAILABLE"
    WORKER_SATURATED = "WORKER_SATURATED"
    WORKER_INTERNAL = "WORKER_INTERNAL"
    WORKER_STREAM_BROKEN = "WORKER_STREAM_BROKEN"
    WORKER_TIMEOUT = "WORKER_TIMEOUT"
    LEG_FAILED = "LEG_FAILED"
    DRAINING = "DRAINING"
    TRANSFER_PARAMS_FORBIDDEN = "TRANSFER_PARAMS_FORBIDDEN"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


class Fault(Exception):
    """A request cannot go on.

    `message` is one plain sentence for the client that names the field, the
    item's index and the limit; it never holds a payload, a query string,
    credentials, a path of this host or an object's address. `metadata` goes
    into `ErrorInfo.metadata`. `retry_after` (seconds) replaces the table's own
    retry hint where the fault knows better.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: dict[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after

    @classmethod
    def of_item(cls, reason: Reason, index: int, message: str, **metadata: object) -> Fault:
        """A fault of one media item; its index goes into message and metadata."""
        return cls(
            reason,
            f"media item {index}: {message}",
            metadata={"index": str(index), **{k: str(v) for k, v in metadata.items()}},
        )

    def for_item(self, index: int) -> Fault:
        """The same fault, told of another item: what is made once may fail for several."""
        told = self.metadata.get("index", "")
        return Fault(
            self.reason,
            self.message.replace(f"media item {told}:", f"media item {index}:", 1),
            metadata={**self.metadata, "index": str(index)},
            retry_after=self.retry_after,
        )
