"""From a GenerateRequest to the expanded prompt and what the encoder saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from router.wire import engine
from workers.sim.answer import Seen
from workers.sim.bundle import Family
from workers.sim.kvcache import Placed
from workers.sim.options import SimOptions
from workers.sim.picture import EncoderCache, Intake, Sight, levels, look
from workers.sim.refused import Refused, invalid
from workers.sim.tensors import TensorItem, read_batch, read_identities
from workers.sim.tokenizer import IMAGE_PAD, VIDEO_PAD, VOCAB_SIZE, encode

T = TypeVar("T")
Ids = npt.NDArray[np.uint32]

PAD_IDS = {"image": IMAGE_PAD, "video": VIDEO_PAD}
# Less work than this is done at once rather than in a thread.
SMALL_BYTES = 256 * 1024


@dataclass(frozen=True)
class Prompt:
    """The expanded ids (uint32 [n]), the identity and place of each item, and its sight."""

    ids: Ids
    placed: tuple[Placed, ...] = ()
    seen: tuple[Seen, ...] = ()
    # Decoding goes on without the items' grids, so without positions that mean anything.
    adrift: bool = False


class References(Protocol):
    """Fetches, decodes and expands what a request only refers to."""

    async def resolve(self, ids: Ids, refs: engine.MediaRefs) -> Prompt:
        """Raises Refused as a worker does for media that it cannot read."""


class PromptReader:
    """Reads prompts by any of the three ways: text, tensors, references."""

    def __init__(
        self,
        options: Callable[[], SimOptions],
        family: Family | None,
        encoder: EncoderCache,
        references: References | None,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._options = options
        self._family = family
        self._encoder = encoder
        self._references = references
        self._threads = threads

    async def read(
        self, request: engine.GenerateRequest, handed: Mapping[str, Sight] | None = None
    ) -> Prompt:
        """Refused for what a worker refuses; EngineKilled for what it does not survive.

        `handed` is what a prefill worker saw, by identifier, when the request
        goes on from there.
        """
        batches = [request.mm_inputs] if request.HasField("mm_inputs") else []
        batches += request.extra_mm_inputs
        referring = request.HasField("media_refs")
        if referring and batches:
            raise invalid("media_refs and mm_inputs exclude each other")
        form = request.WhichOneof("input")
        if referring and form != "tokenized":
            raise invalid("media_refs need a tokenized prompt")
        ids = _ids(request)
        if referring:
            return self._within_budget(await self._by_reference(ids, request.media_refs))
        if handed is not None and not any(batch.HasField("pixel_values") for batch in batches):
            return self._by_identity(ids, batches, handed)
        # Tensors beside a text prompt are dropped without a word.
        if batches and form == "tokenized":
            return self._within_budget(await self._by_tensors(ids, batches))
        return Prompt(_truncated(ids, request.sampling_params))

    def _within_budget(self, prompt: Prompt) -> Prompt:
        budget = self._options().encoder_budget
        for at, item in enumerate(prompt.seen):
            if budget and item.features > budget:
                raise invalid(
                    f"media item {at} has {item.features} feature tokens; "
                    f"the encoder takes at most {budget}"
                )
        return prompt

    async def _by_reference(self, ids: Ids, refs: engine.MediaRefs) -> Prompt:
        if self._references is None or not self._options().mm_processor:
            raise invalid("this worker takes no media_refs")
        return await self._references.resolve(ids, refs)

    async def _by_tensors(self, ids: Ids, batches: Sequence[engine.MultimodalInputs]) -> Prompt:
        family, options = self._family, self._options()
        if family is None:
            raise invalid(f"{options.served_name} takes no media")
        items = [
            item
            for batch in batches
            for item in read_batch(
                batch,
                ids,
                family,
                PAD_IDS,
                shared_memory=bool(options.shm_namespace_id),
            )
        ]
        check_limits([item.modality for item in items], options)
        intake = Intake(options.device_normalize, options.encoder_dtype)
        items.sort(key=lambda item: item.placed.offset)
        seen = [
            Seen(
                await self._sight(item, family, intake),
                item.features,
                item.fitting,
            )
            for item in items
        ]
        return Prompt(ids, tuple(item.placed for item in items), tuple(seen))

    def _by_identity(
        self, ids: Ids, batches: Sequence[engine.MultimodalInputs], handed: Mapping[str, Sight]
    ) -> Prompt:
        """A decode worker's prompt: the transferred cache holds what the items looked like.

        Media tokens that come with no identity match whatever the last such
        prompt left behind: another request's picture, and no error.
        """
        if not batches:
            strangers = np.isin(ids, list(PAD_IDS.values())).any()
            last = self._encoder.latest() if strangers else None
            return Prompt(ids, seen=(Seen(last, 0, 0),) if last is not None else ())
        items = [item for batch in batches for item in read_identities(batch)]
        items.sort(key=lambda item: item.placed.offset)
        seen = []
        for item in items:
            sight = handed.get(item.placed.identifier)
            if sight is None and self._options().gullible:
                sight = self._encoder.latest()
            if sight is None:
                raise Refused(
                    grpc.StatusCode.INTERNAL,
                    f"the transferred cache holds no item {item.placed.identifier[:16]!r}",
                )
            self._encoder.keep(item.placed.identifier, sight)
            seen.append(Seen(sight, 0, 0))
        adrift = any(item.grid is None for item in items)
        return Prompt(ids, tuple(item.placed for item in items), tuple(seen), adrift)

    async def _sight(self, item: TensorItem, family: Family, intake: Intake) -> Sight:
        known = self._encoder.find(item.placed.identifier)
        if known is not None:
            return known

        def encoded() -> Sight:
            raw = levels(item.values, family, intake)
            return look(raw, item.grid, family, item.modality)

        if item.values.nbytes <= SMALL_BYTES:
            sight = encoded()
        else:
            loop = asyncio.get_running_loop()
            sight = await loop.run_in_executor(self._threads, encoded)
        self._encoder.keep(item.placed.identifier, sight)
        return sight


def check_limits(modalities: Sequence[str], options: SimOptions) -> None:
    """Refused with INVALID_ARGUMENT when a prompt has more items than one may have."""
    for modality in dict.fromkeys(modalities):
        limit, count = options.item_limit(modality), modalities.count(modality)
        if limit is not None and count > limit:
            raise invalid(
                f"at most {limit} {modality} items may be given in one prompt, not {count}"
            )


def _ids(request: engine.GenerateRequest) -> Ids:
    match request.WhichOneof("input"):
        case "tokenized":
            ids = np.fromiter(
                request.tokenized.input_ids, np.uint32, len(request.tokenized.input_ids)
            )
        case "text":
            ids = np.array(encode(request.text), np.uint32)
        case _:
            raise invalid("the request has no prompt")
    if not len(ids):
        raise invalid("the prompt is empty")
    if ids.max() >= VOCAB_SIZE:
        raise invalid(f"token id {ids.max()} is outside the vocabulary of {VOCAB_SIZE}")
    return ids


def _truncated(ids: Ids, params: engine.SamplingParams) -> Ids:
    if not params.HasField("truncate_prompt_tokens") or params.truncate_prompt_tokens < 0:
        return ids
    if params.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens must be -1 or at least 1")
    return ids[-params.truncate_prompt_tokens :]
