"""A request ready for the wire: everything that later steps and attempts need."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from router.prefix.blocks import PromptBlocks
from router.prefix.learn import References
from router.vision.plan import PixelFormat
from router.vision.tensors import Batch, serialize
from router.wire import common, engine

# Bytes of pixels; fewer are copied in less time than a thread takes to begin.
_LARGE = 4 << 20


@dataclass(frozen=True)
class Body:
    """What the bytes of each attempt are made from.

    `batches` are router-made tensors, whose pixels are copied once, into the
    bytes that are sent.
    """

    request: engine.GenerateRequest
    batches: Sequence[Batch] = ()

    def wire(self, request_id: str, handles: Sequence[common.ShmHandle] | None = None) -> bytes:
        """The serialised request under the id that the worker is to see.

        With `handles`, one a batch, the pixels are in shared memory, and the
        message says where.
        """
        self.request.request_id = request_id
        if not self.batches:
            return self.request.SerializeToString()
        if handles is None:
            return serialize(self.request, self.batches)
        tensors = engine.GenerateRequest()
        for position, (batch, handle) in enumerate(zip(self.batches, handles, strict=True)):
            inputs = tensors.extra_mm_inputs.add() if position else tensors.mm_inputs
            inputs.CopyFrom(batch.head)
            inputs.pixel_values.shm.CopyFrom(handle)
        # Messages of one type concatenate.
        return self.request.SerializeToString() + tensors.SerializeToString()

    async def wire_of(
        self, request_id: str, handles: Sequence[common.ShmHandle] | None = None
    ) -> bytes:
        """`wire`, in a thread where its copy would keep the loop for milliseconds."""
        if handles is None and sum(batch.payload_bytes for batch in self.batches) > _LARGE:
            return await asyncio.to_thread(self.wire, request_id)
        return self.wire(request_id, handles)


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
    in feature tokens, 0 while not known. `blocks` are for whoever scores
    prefixes, None where nobody does; `references` are the media in them that a
    worker is to fetch.
    """

    body: Body
    prompt_tokens: int
    estimated: bool = False
    item_counts: tuple[tuple[str, int], ...] = ()
    items: tuple[ItemSize, ...] = ()
    largest_item_tokens: int = 0
    pixel_format: PixelFormat | None = None
    model_fingerprint: str | None = None
    blocks: PromptBlocks | None = None
    references: References | None = None
