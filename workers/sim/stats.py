"""What has happened to the worker so far, for tests and for people who debug a client."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from router.wire import engine

# A reference longer than this is kept as its beginning and its SHA-256.
LONGEST_URL = 2_048


@dataclass(frozen=True)
class Received:
    """One GenerateRequest as it came, without pixels.

    `request` has empty payloads in its tensors, and long data: URLs cut.
    `extensions` names the fields from 1000 on that were set: a router strips
    them, so a worker should never see one. `wire_bytes` is the size of the
    whole message.
    """

    request: engine.GenerateRequest
    metadata: tuple[tuple[str, str], ...]
    extensions: tuple[str, ...]
    wire_bytes: int
    at: float


@dataclass
class Stats:
    """Counters since the start. `live` is how many Generate calls are open now."""

    record: int
    calls: Counter[str] = field(default_factory=Counter)
    live: int = 0
    finished: int = 0
    aborted: int = 0
    cancelled: int = 0
    # Generate calls that ended with an error, by the name of its status.
    refused: Counter[str] = field(default_factory=Counter)
    with_extensions: int = 0
    tokens: int = 0
    received: deque[Received] = field(init=False)

    def __post_init__(self) -> None:
        self.received = deque(maxlen=self.record)

    def note(self, request: engine.GenerateRequest, metadata: Iterable[tuple[str, str]]) -> None:
        """Keeps what is worth keeping of a request that has just arrived."""
        extensions = tuple(extension_fields(request))
        if extensions:
            self.with_extensions += 1
        if self.record:
            self.received.append(
                Received(
                    request=without_payloads(request),
                    metadata=tuple(metadata),
                    extensions=extensions,
                    wire_bytes=request.ByteSize(),
                    at=time.time(),
                )
            )


def without_payloads(request: engine.GenerateRequest) -> engine.GenerateRequest:
    """A copy in which tensors have shapes but no bytes and long URLs are cut."""
    copy = engine.GenerateRequest()
    for descriptor, value in request.ListFields():
        match descriptor.name:
            case "mm_inputs":
                _copy_batch(value, copy.mm_inputs)
            case "extra_mm_inputs":
                for batch in value:
                    _copy_batch(batch, copy.extra_mm_inputs.add())
            case "media_refs":
                for item in value.items:
                    copy.media_refs.items.add(modality=item.modality, url=short_url(item.url))
            case name if descriptor.message_type is not None:
                getattr(copy, name).CopyFrom(value)
            case name:
                setattr(copy, name, value)
    return copy


def short_url(url: str) -> str:
    if len(url) <= LONGEST_URL:
        return url
    digest = hashlib.sha256(url.encode()).hexdigest()
    return f"{url[:64]}…[{len(url)} characters, sha256 {digest}]"


def _copy_batch(batch: engine.MultimodalInputs, copy: engine.MultimodalInputs) -> None:
    for descriptor, value in batch.ListFields():
        match descriptor.name:
            case "pixel_values":
                copy.pixel_values.shape.extend(value.shape)
                copy.pixel_values.dtype = value.dtype
            case "model_specific_tensors":
                # Small: grids and sizes.
                for name, tensor in value.items():
                    copy.model_specific_tensors[name].CopyFrom(tensor)
            case "mm_placeholders":
                copy.mm_placeholders.MergeFrom(value)
            case "flat_keys":
                copy.flat_keys.update(value)
            case "mm_hashes" | "batched_keys" | "keep_on_cpu_keys" as name:
                getattr(copy, name).extend(value)
            case name:
                setattr(copy, name, value)


def extension_fields(request: engine.GenerateRequest) -> list[str]:
    """Names or numbers of the set fields that are numbered 1000 and up."""
    found = _numbered_high(request, "")
    for at, item in enumerate(request.media_refs.items):
        found += _numbered_high(item, f"media_refs.items[{at}].")
    for name, message in _parts(request):
        found += _numbered_high(message, f"{name}.")
    return found


def _parts(request: engine.GenerateRequest) -> Sequence[tuple[str, Message]]:
    parts: list[tuple[str, Message]] = [("sampling_params", request.sampling_params)]
    if request.HasField("mm_inputs"):
        parts.append(("mm_inputs", request.mm_inputs))
    return parts


def _numbered_high(message: Message, prefix: str) -> list[str]:
    known = [
        prefix + descriptor.name
        for descriptor, _ in message.ListFields()
        if descriptor.number >= 1000
    ]
    unknown = [
        f"{prefix}{field.field_number}"
        for field in UnknownFieldSet(message)  # type: ignore[attr-defined]
        if field.field_number >= 1000
    ]
    return known + unknown
