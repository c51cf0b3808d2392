"""From a request to the bytes for a worker.

In the router: fetch, sniff, plan, decode, resize and pack each item, expand
the prompt, and check the result as if a stranger had made it. In the worker:
judge the references and leave them as they are.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from router.faults import Fault, Reason
from router.fleet.model import Model
from router.fleet.tokens import UnreadableTokenizer
from router.media.intake import Glance, MediaIntake
from router.media.ticket import Ticket
from router.prefix.blocks import MediaSpan, PromptBlocks
from router.prefix.names import Learned
from router.request.anchors import check_anchors, refuse_anchor_texts, refuse_anchors
from router.request.estimate import estimate_item
from router.request.interest import Interest
from router.request.plan import MediaItem, MediaPlan
from router.request.prepared import Body, ItemSize, Prepared
from router.request.referred import Item, expand
from router.request.tensors_in import adopt_client_tensors
from router.request.tensors_out import Recipe, TensorMaker, batches_of
from router.vision.identity import item_identity
from router.vision.plan import ModelSpec, PixelFormat
from router.vision.tensors_check import WireLimits, check_mm_inputs
from router.wire import engine

T = TypeVar("T")

# Raises the `Fault` of a request that nobody can have, of which all but the pixels is known.
Admit = Callable[[Prepared], Awaitable[None]]
# By a model's served name and the router's name of an item.
FindLearned = Callable[[str, str], Learned | None]


class Preparer:
    """Owns nothing; knows where media come from and what packs them.

    `learned` finds what workers of a model call an item that the router calls
    by another name.
    """

    def __init__(
        self,
        intake: MediaIntake,
        tensors: TensorMaker,
        *,
        learned: FindLearned = lambda model, name: None,
    ) -> None:
        self._intake = intake
        self._tensors = tensors
        self._learned = learned

    # -- No references

    async def text(
        self,
        request: engine.GenerateRequest,
        model: Model | None,
        context_length: int | None,
        interest: Interest,
    ) -> Prepared:
        """A request without media goes on as it is.

        `context_length` is the longest that any worker of the model has. A
        text that might exceed it is tokenised, since a worker may not survive
        a prompt that is too long; and where prefixes are scored.
        """
        # A worker that truncates the prompt itself takes one of any length, and what is left
        # of it is another prompt.
        truncated = request.sampling_params.HasField("truncate_prompt_tokens")
        if request.WhichOneof("input") == "tokenized":
            ids = request.tokenized.input_ids
            if model is not None and model.spec is not None:
                refuse_anchors(model.spec, ids)
            return Prepared(
                Body(strip(request)),
                len(ids),
                estimated=truncated,
                blocks=_blocks(ids) if interest.prefixes and not truncated else None,
            )
        text, body = request.text, Body(strip(request))
        if model is not None:
            refuse_anchor_texts(model.anchor_texts, text)
        # A token stands for at least a byte, and most for about four.
        guessed = Prepared(body, max(1, len(text) // 4), estimated=True)
        if truncated or not (context_length and model and model.counter):
            return guessed
        try:
            if interest.prefixes:
                tokens = await asyncio.to_thread(model.counter.ids, text, enough=context_length)
                if tokens is not None:
                    return Prepared(body, len(tokens), blocks=_blocks(tokens))
            if len(text) * 4 > context_length:
                count = await asyncio.to_thread(model.counter.count, text, enough=context_length)
                return Prepared(body, count)
        except UnreadableTokenizer:
            return guessed
        return guessed

    async def client_tensors(
        self,
        request: engine.GenerateRequest,
        model: Model,
        interest: Interest,
        *,
        trust_hashes: bool,
    ) -> Prepared:
        """A request whose tensors the client made: checked, its hashes made our own."""
        spec = spec_of(model)
        checked = await asyncio.to_thread(adopt_client_tensors, request, spec, trust_hashes)
        formats = {f for f in checked.pixel_formats if f is not None}
        if len({f.normalized for f in formats}) > 1:
            raise Fault(
                Reason.MALFORMED_TENSORS,
                "mm_inputs: one batch holds raw pixels and another normalised ones",
                metadata={"check": "dtype"},
            )
        return Prepared(
            Body(strip(request)),
            prompt_tokens=len(request.tokenized.input_ids),
            item_counts=checked.item_counts,
            largest_item_tokens=checked.largest_item_tokens,
            pixel_format=min(formats, key=lambda f: f.itemsize, default=None),
            blocks=_client_blocks(request) if interest.prefixes else None,
        )

    # -- In the worker

    async def forward(
        self,
        request: engine.GenerateRequest,
        plan: MediaPlan,
        model: Model,
        model_id: str,
        interest: Interest,
        *,
        served: str,
    ) -> Prepared:
        """References for a worker: each judged, one anchor each, nothing fetched.

        But for the first bytes of pictures where their sizes are of interest.
        `served` is what clients call the model, `model_id` what its workers do.
        """
        spec = spec_of(model)
        ids = request.tokenized.input_ids
        check_anchors(spec, ids, plan.items)
        seen = await _all(self._look(i, model_id, interest) for i in plan.items)
        items = [
            Item(
                glance,
                estimate_item(spec, item, glance),
                self._learned(served, glance.name) if interest.prefixes else None,
            )
            for item, glance in zip(plan.items, seen, strict=True)
        ]
        prompt = expand(spec, ids, items, prefixes=interest.prefixes)
        return Prepared(
            Body(strip(request)),
            prompt_tokens=prompt.tokens,
            estimated=True,
            blocks=prompt.blocks,
            references=prompt.references,
            item_counts=_counts(plan.items),
            items=prompt.items,
        )

    async def _look(self, item: MediaItem, model_id: str, interest: Interest) -> Glance:
        source = item.source

        def name(data: bytes) -> str:
            # What the worker itself will call a file that needs no conversion.
            return item_identity(source.modality, data, model_id)

        return await self._intake.judge(
            source,
            item.index,
            measure=interest.lengths,
            digest=name if interest.prefixes else None,
        )

    # -- In the router

    async def process(
        self,
        request: engine.GenerateRequest,
        plan: MediaPlan,
        model: Model,
        model_id: str,
        pixels: PixelFormat,
        ticket: Ticket,
        interest: Interest,
        admit: Admit,
    ) -> Prepared:
        """Tensors for a worker that takes `pixels`, and the expanded prompt.

        `admit` is asked once all is known that a worker must be like, before any pixel is touched.
        """
        spec = spec_of(model)
        for item in plan.items:
            if item.modality not in spec.modalities:
                raise Fault.of_item(
                    Reason.MULTIMODAL_NOT_SUPPORTED,
                    item.index,
                    f"this model takes no {item.modality}",
                    modality=item.modality,
                )
        ids = request.tokenized.input_ids
        check_anchors(spec, ids, plan.items)
        loaded = await _all(self._tensors.load(item, spec, ticket) for item in plan.items)
        expanded = spec.expand(ids, [x.plan for x in loaded])
        outline = Prepared(
            Body(request),
            prompt_tokens=len(expanded.ids),
            item_counts=_counts(plan.items),
            items=tuple(
                ItemSize(x.plan.source_width, x.plan.source_height, x.plan.feature_tokens)
                for x in loaded
            ),
            largest_item_tokens=max(x.plan.feature_tokens for x in loaded),
            pixel_format=pixels,
            model_fingerprint=model.fingerprint,
        )
        await admit(outline)
        recipe = Recipe(spec, model.fingerprint, model_id, pixels)
        # All at once and before the work: a request that does not fit is turned away soon.
        nbytes = sum(x.plan.output_bytes(pixels) for x in loaded)
        await ticket.take_bytes(nbytes, loaded[-1].plan.index)
        tensors = await _all(self._tensors.tensor(x, recipe, ticket) for x in loaded)
        hashes = [tensor.identity for tensor in tensors]
        arrays = [tensor.values for tensor in tensors]
        batches = batches_of(spec, loaded, arrays, pixels, expanded.ranges, hashes)
        check_mm_inputs(
            [b.head for b in batches],
            expanded.ids,
            spec,
            WireLimits(pixels=pixels),
            pixel_bytes=[b.payload_bytes for b in batches],
        )
        request.ClearField("media_refs")
        stripped = strip(request)
        del stripped.tokenized.input_ids[:]
        stripped.tokenized.input_ids.extend(expanded.ids.tolist())
        return replace(
            outline,
            body=Body(stripped, batches),
            blocks=PromptBlocks(expanded.ids, _spans(hashes, expanded.ranges))
            if interest.prefixes
            else None,
        )


def strip(request: engine.GenerateRequest) -> engine.GenerateRequest:
    """The request, rid of our extension fields, as a worker is to see it.

    In place: the parsed request is ours, and may carry megabytes.
    """
    request.ClearField("router")
    for ref in request.media_refs.items:
        ref.ClearField("data")
        ref.ClearField("hints")
    return request


def spec_of(model: Model) -> ModelSpec:
    """How the model's media become tensors. Raises `Fault` MULTIMODAL_NOT_SUPPORTED."""
    if model.spec is None:
        raise Fault(
            Reason.MULTIMODAL_NOT_SUPPORTED,
            model.problem or "this model takes no media, or its family is not known",
        )
    return model.spec


def _blocks(ids: Sequence[int]) -> PromptBlocks:
    # A copy: the request is let go before the stream ends.
    return PromptBlocks(np.array(ids, np.uint32))


def _client_blocks(request: engine.GenerateRequest) -> PromptBlocks:
    """Of a prompt with a client's tensors, as far as their identities are known."""
    ids = np.array(request.tokenized.input_ids, np.uint32)
    spans = []
    for batch in (request.mm_inputs, *request.extra_mm_inputs):
        if len(batch.mm_hashes) != len(batch.mm_placeholders):
            # Another picture of this size would look the same from here on.
            ids = ids[: min((p.offset for p in batch.mm_placeholders), default=len(ids))]
            continue
        for name, place in zip(batch.mm_hashes, batch.mm_placeholders, strict=True):
            spans.append(MediaSpan(name, place.offset, place.length))
    spans.sort(key=lambda span: span.offset)
    return PromptBlocks(ids, spans)


def _spans(names: Sequence[str], ranges: Sequence[tuple[int, int]]) -> list[MediaSpan]:
    return [MediaSpan(name, *place) for name, place in zip(names, ranges, strict=True)]


def _counts(items: Sequence[MediaItem]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(item.modality for item in items).items()))


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits all at once; the first failure cancels the rest and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
