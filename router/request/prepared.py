"""A request ready for the wire: everything that later steps and attempts need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.vision.plan import PixelFormat
from router.vision.tensors import Batch, serialize
from router.wire import engine


class Body(Protocol):
    """Makes the bytes of one attempt."""

    @property
    def request(self) -> engine.GenerateRequest: ...

    def wire(self, request_id: str) -> bytes: ...


@dataclass(frozen=True)
class MessageBody:
    """A request whose bytes are protobuf's own."""

    request: engine.GenerateRequest

    def wire(self, request_id: str) -> bytes:
        """The serialised request under the id that the worker is to see."""
        self.request.request_id = request_id
        return self.request.SerializeToString()


@dataclass(frozen=True)
class TensorBody:
    """A request with router-made tensors, whose pixels are copied once, into the bytes sent."""

    request: engine.GenerateRequest
    batches: Sequence[Batch]

    def wire(self, request_id: str) -> bytes:
        """The serialised request under the id that the worker is to see."""
        self.request.request_id = request_id
        return serialize(self.request, self.batches)


@dataclass(frozen=True)
class ItemSize:
    """One media item: its picture's size in pixels (0 when not known) and its feature tokens."""

    width: int
    height: int
    tokens: int


@dataclass(frozen=True)
class Prepared:
    """`prompt_tokens` is the expanded length; `estimated` says that it was guessed from
    what the router could see of forwarded references. `largest_item_tokens` is
    in feature tokens, 0 while not known.
    """

    body: Body
    prompt_tokens: int
    estimated: bool = False
    item_counts: tuple[tuple[str, int], ...] = ()
    items: tuple[ItemSize, ...] = ()
    largest_item_tokens: int = 0
    pixel_format: PixelFormat | None = None
    model_fingerprint: str | None = None
