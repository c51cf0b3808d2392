"""Tensors that the router makes: one item at a time, from its encoded file to packed pixels.

Each is made once for all requests that want it at the same time, and kept for
those that come later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from router.faults import Fault
from router.media.intake import MediaIntake
from router.media.reader import SMALL
from router.media.ticket import Blob, Clip, Ticket
from router.observe.logging import get_logger
from router.observe.metrics import Metrics
from router.observe.tracing import Tracing
from router.request.plan import MediaItem
from router.vision.backend.base import Backend
from router.vision.identity import item_identity
from router.vision.plan import ItemPlan, ModelSpec, PixelFormat
from router.vision.tensors import Batch, build_batch

_log = get_logger("request")

# Labels are of a fixed set, whatever clients ask for.
_SCHEMES = frozenset({"http", "https", "data", "file", "inline"})


@dataclass(frozen=True)
class Loaded:
    """One item, encoded and planned."""

    encoded: Blob | Clip
    plan: ItemPlan


@dataclass(frozen=True)
class Recipe:
    """What shapes tensors beside the media themselves."""

    spec: ModelSpec
    fingerprint: str
    model_id: str
    pixels: PixelFormat


@dataclass(frozen=True)
class Tensor:
    """One item's identity and packed pixels."""

    identity: str
    values: npt.NDArray[Any]


class TensorMaker:
    """Fetches, plans, decodes, resizes and packs; what media take is on the request's ticket."""

    def __init__(
        self, intake: MediaIntake, backend: Backend, metrics: Metrics, tracing: Tracing
    ) -> None:
        self._intake = intake
        self._backend = backend
        self._metrics = metrics
        self._tracing = tracing
        self._at_work = asyncio.Semaphore(max(1, intake.limits.worker_threads))

    async def load(self, item: MediaItem, spec: ModelSpec, ticket: Ticket) -> Loaded:
        """Fetches the item's file, reads its header and plans its tensor.

        Raises `Fault` as `Ticket.load` and `load_clip` do, and MEDIA_ASPECT_RATIO.
        """
        encoded: Blob | Clip
        with self._tracing.step("fetch"), self._metrics.fetch.time():
            if item.modality == "video":
                encoded = await ticket.load_clip(item.source, item.index)
            else:
                encoded = await ticket.load(item.source, item.index)
        scheme = item.scheme if item.scheme in _SCHEMES else "other"
        self._metrics.media_bytes.labels(scheme).inc(len(encoded.data))
        if _log.is_enabled_for(logging.DEBUG):
            _tell(item, scheme, encoded)
        return Loaded(encoded, _plan_of(encoded, item, spec))

    async def tensor(self, loaded: Loaded, recipe: Recipe, ticket: Ticket) -> Tensor:
        """The item's packed pixels, from the cache where the same were made before.

        Raises `Fault`: MEDIA_DECODE_FAILED, MEDIA_TOO_LARGE, MEDIA_BUDGET_FULL.
        """
        with self._stage("hash"):
            data, plan = loaded.encoded.data, loaded.plan
            changes = plan.hint, self._intake.background_of(loaded.encoded)
            named = plan.modality, data, recipe.model_id, changes
            if len(data) <= SMALL:
                identity = item_identity(*named)
            else:
                identity = await ticket.run(item_identity, *named)
        try:
            values = await self._intake.contents.get(
                (identity, recipe.fingerprint, recipe.pixels),
                lambda: self._make(loaded, recipe),
                lambda array: array.nbytes,
            )
        except Fault as fault:
            # It may have been made for an item of another request.
            raise fault.for_item(plan.index) from None
        return Tensor(identity, values)

    async def _make(self, loaded: Loaded, recipe: Recipe) -> npt.NDArray[Any]:
        # Others may wait for the same item, so it is not on one request's ticket. Pictures
        # beyond what the threads can work on would only fill memory.
        async with self._at_work:
            with self._intake.ticket() as ticket:
                if isinstance(loaded.encoded, Blob) and not loaded.encoded.hard:
                    work = partial(self._decode_and_pack, loaded.plan, recipe)
                    return await ticket.decode_within(loaded.encoded, work)
                with self._stage("decode"):
                    pixels = await _pixels(loaded, ticket)
                return await ticket.run(self._pack, loaded.plan, recipe, pixels)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        with self._tracing.step(name), self._metrics.stage.labels(name).time():
            yield

    def _decode_and_pack(
        self, plan: ItemPlan, recipe: Recipe, decode: Callable[[], npt.NDArray[np.uint8]]
    ) -> npt.NDArray[Any]:
        with self._stage("decode"):
            pixels = decode()
        return self._pack(plan, recipe, pixels)

    def _pack(
        self, plan: ItemPlan, recipe: Recipe, pixels: npt.NDArray[np.uint8]
    ) -> npt.NDArray[Any]:
        self._metrics.media_pixels.labels(plan.modality).inc(pixels.size // 3)
        with self._stage("pack"):
            return recipe.spec.pack(plan, pixels, recipe.pixels, self._backend)


def _tell(item: MediaItem, scheme: str, encoded: Blob | Clip) -> None:
    """Logs what an item is, without path, query and content."""
    hosted = item.url is not None and scheme in ("http", "https")
    _log.debug(
        "media",
        index=item.index,
        scheme=scheme,
        host=urlsplit(item.url).hostname if hosted else None,
        nbytes=len(encoded.data),
        type="video" if isinstance(encoded, Clip) else encoded.header.format.value,
        width=encoded.header.width,
        height=encoded.header.height,
    )


def _plan_of(encoded: Blob | Clip, item: MediaItem, spec: ModelSpec) -> ItemPlan:
    header = encoded.header
    if isinstance(encoded, Clip):
        return spec.plan_video(
            header.width,
            header.height,
            index=item.index,
            total_frames=encoded.header.frames,
            fps=encoded.header.fps or None,
            sample_fps=item.fps,
            max_long_side=item.max_long_side,
        )
    return spec.plan_image(
        header.width, header.height, index=item.index, max_long_side=item.max_long_side
    )


async def _pixels(loaded: Loaded, ticket: Ticket) -> npt.NDArray[np.uint8]:
    if isinstance(loaded.encoded, Clip):
        return await ticket.frames(loaded.encoded, loaded.plan.frames)
    return await ticket.decode(loaded.encoded)


def batches_of(
    spec: ModelSpec,
    loaded: Sequence[Loaded],
    arrays: Sequence[npt.NDArray[Any]],
    pixels: PixelFormat,
    ranges: Sequence[tuple[int, int]],
    hashes: Sequence[str],
) -> list[Batch]:
    """One batch for each modality of the request, `arrays` and the rest in prompt order."""
    batches = []
    # Images first, as the modality that a plain mm_inputs is taken for.
    for modality in sorted({x.plan.modality for x in loaded}):
        at = [i for i, x in enumerate(loaded) if x.plan.modality == modality]
        batches.append(
            build_batch(
                spec,
                [loaded[i].plan for i in at],
                [arrays[i] for i in at],
                pixels,
                [ranges[i] for i in at],
                [hashes[i] for i in at],
            )
        )
    return batches
