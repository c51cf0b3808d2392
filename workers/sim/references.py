"""Media that a request only refers to: fetched, decoded and expanded by the worker itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import grpc
import numpy as np

from router.buffers import BufferPool
from router.faults import Fault, Reason
from router.media.header import Colour
from router.media.intake import Blob, Clip, MediaIntake, MediaSource, Ticket
from router.media.limits import MIB, FetchLimits, MediaLimits
from router.vision.backend.cpu import CpuBackend
from router.vision.files import ModelFiles
from router.vision.identity import item_identity
from router.vision.plan import ItemPlan, Modality, ModelSpec, PixelFormat
from router.vision.registry import spec_for
from router.wire import common, engine
from workers.sim.answer import Seen
from workers.sim.bundle import Family, architectures
from workers.sim.kvcache import Placed
from workers.sim.options import SimOptions
from workers.sim.picture import EncoderCache, Grid, Intake, Sight, levels, look
from workers.sim.prompt import Ids, Prompt, check_limits
from workers.sim.refused import Refused, invalid

RAW = PixelFormat("uint8", normalized=False)
NORMALIZED = PixelFormat("float32", normalized=True)
_MODALITIES: Mapping[int, Modality] = {common.IMAGE: "image", common.VIDEO: "video"}
_UNAVAILABLE = frozenset({Reason.MEDIA_FETCH_FAILED, Reason.MEDIA_FETCH_TIMEOUT})


class MediaReferences:
    """Resolves references as the processor inside a vLLM worker does.

    The worker asks any host, private ones included: judging references is the
    router's business.
    """

    def __init__(
        self,
        options: Callable[[], SimOptions],
        family: Family,
        files: Mapping[str, bytes],
        encoder: EncoderCache,
    ) -> None:
        self._options = options
        self._family = family
        self._encoder = encoder
        self._spec = _spec(options(), files)
        self._backend = CpuBackend(BufferPool(64 * MIB))
        self._intake: MediaIntake | None = None

    async def close(self) -> None:
        """Closes connections and threads."""
        if self._intake is not None:
            await self._intake.close()

    async def resolve(self, ids: Ids, refs: engine.MediaRefs) -> Prompt:
        """The expanded prompt. Raises Refused as the worker answers each fault."""
        options = self._options()
        if not refs.items:
            raise invalid("media_refs hold no items")
        sources = [_source(at, item, options) for at, item in enumerate(refs.items)]
        check_limits([source.modality for source in sources], options)
        try:
            return await self._resolve(ids, sources)
        except Fault as fault:
            status = grpc.StatusCode.INVALID_ARGUMENT
            if fault.reason in _UNAVAILABLE:
                status = grpc.StatusCode.UNAVAILABLE
            elif fault.reason is Reason.ANCHOR_MISMATCH:
                status = grpc.StatusCode.INTERNAL
            raise Refused(status, _worded(fault)) from fault

    async def _resolve(self, ids: Ids, sources: list[MediaSource]) -> Prompt:
        if self._intake is None:
            self._intake = MediaIntake(_limits(self._options()))
        with self._intake.ticket() as ticket:
            files = await _all_loaded(ticket, sources)
            plans = [self._plan(file) for file in files]
            ids, ranges = self._expanded(ids, plans)
            placed, seen = [], []
            for file, plan, (offset, length) in zip(files, plans, ranges, strict=True):
                model = self._options().model
                identifier = item_identity(plan.modality, file.data, model, _conversion(file))
                placed.append(Placed(identifier, offset, length))
                sight = await self._sight(ticket, file, plan, identifier)
                seen.append(Seen(sight, plan.feature_tokens, plan.feature_tokens))
        return Prompt(ids, tuple(placed), tuple(seen))

    def _plan(self, file: Blob | Clip) -> ItemPlan:
        header = file.header
        if isinstance(file, Blob):
            return self._spec.plan_image(header.width, header.height, index=file.index)
        return self._spec.plan_video(
            header.width,
            header.height,
            index=file.index,
            total_frames=file.header.frames,
            fps=file.header.fps or None,
        )

    def _expanded(self, ids: Ids, plans: list[ItemPlan]) -> tuple[Ids, tuple[tuple[int, int], ...]]:
        """Anchors beyond the last item stay as they are, as in a real worker: no error, no image.

        Raises Fault ANCHOR_MISMATCH for fewer anchors than items.
        """
        watched = np.fromiter(self._spec.anchor_ids.values(), np.uint32)
        anchors = np.flatnonzero(np.isin(ids, watched))
        end = int(anchors[len(plans)]) if len(anchors) > len(plans) else len(ids)
        expanded = self._spec.expand(ids[:end], plans)
        return np.concatenate([expanded.ids, ids[end:]]), expanded.ranges

    async def _sight(
        self, ticket: Ticket, file: Blob | Clip, plan: ItemPlan, identifier: str
    ) -> Sight:
        known = self._encoder.find(identifier)
        if known is not None:
            return known
        if isinstance(file, Blob):
            pixels = await ticket.decode(file)
        else:
            pixels = await ticket.frames(file, plan.frames)

        options = self._options()
        intake = Intake(options.device_normalize, options.encoder_dtype)
        form = RAW if intake.device_normalize else NORMALIZED

        def encoded() -> Sight:
            values = self._spec.pack(plan, pixels, form, self._backend)
            raw = levels(values, self._family, intake)
            return look(raw, _grid(plan), self._family, plan.modality)

        sight = await ticket.run(encoded)
        self._encoder.keep(identifier, sight)
        return sight


def _conversion(file: Blob | Clip) -> tuple[str, ...]:
    """What a real worker does to the file before it hashes it, which makes it another item.

    Only a file whose pixels are RGB of 8 bits is hashed as it came.
    """
    if isinstance(file, Clip):
        return ("frames",)
    header = file.header
    plain = header.colour is Colour.RGB and header.bit_depth == 8 and not header.has_alpha
    return () if plain else ("converted",)


def _grid(plan: ItemPlan) -> Grid:
    t, rows, columns = plan.grid
    return t, rows, columns


def _spec(options: SimOptions, files: Mapping[str, bytes]) -> ModelSpec:
    spec = spec_for(options.model_type, architectures(options), ModelFiles.from_archive(files))
    if spec is None:
        raise ValueError(f"no vision spec for model type {options.model_type}")
    return spec


def _limits(options: SimOptions) -> MediaLimits:
    return MediaLimits(
        request_bytes=4096 * MIB,
        request_pixels=1 << 40,
        budget_bytes=4096 * MIB,
        budget_pixels=1 << 40,
        # A worker fetches what it is told to, as often as it is told to.
        cache_bytes=0,
        local_root=options.local_root,
        worker_threads=2,
        fetch=FetchLimits(
            allow_private_hosts=True,
            user_agent="mmrouter-sim",
            connect_timeout=options.media_timeout,
            image_timeout=options.media_timeout,
            video_timeout=options.media_timeout,
            resolver_threads=4,
        ),
    )


def _source(at: int, item: engine.MediaRef, options: SimOptions) -> MediaSource:
    modality = _MODALITIES.get(item.modality)
    if modality is None:
        raise invalid(f"media item {at}: modality {int(item.modality)} is not supported")
    if not item.url:
        raise invalid(f"media item {at}: the url is empty")
    scheme = item.url.partition(":")[0].lower()
    if scheme not in options.schemes:
        raise invalid(f"media item {at}: the worker does not take this URL scheme")
    return MediaSource(modality, url=item.url)


async def _all_loaded(ticket: Ticket, sources: list[MediaSource]) -> list[Blob | Clip]:
    """All items at once; the first to fail ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[Blob] | asyncio.Task[Clip]] = [
                group.create_task(ticket.load(source, at))
                if source.modality == "image"
                else group.create_task(ticket.load_clip(source, at))
                for at, source in enumerate(sources)
            ]
    except* Fault as faults:
        raise _first(faults) from None
    return [task.result() for task in tasks]


def _first(faults: ExceptionGroup[Fault]) -> Fault:
    fault = faults.exceptions[0]
    assert isinstance(fault, Fault)
    return fault


def _worded(fault: Fault) -> str:
    """The sentence of vLLM's media connector and its servicer for a fault of ours.

    The servicer alone knows which item it was: the connector's sentences do not say.
    """
    at = fault.metadata.get("index", "0")
    match fault.reason:
        case Reason.MEDIA_FETCH_FAILED | Reason.MEDIA_FETCH_TIMEOUT:
            return f"media_refs[{at}]: fetch failed: {fault.message}"
        case Reason.MEDIA_NOT_FOUND:
            status = fault.metadata.get("http_status", "404")
            return f"Failed to fetch media from URL: HTTP {status} error (parameter=image_url)"
        case Reason.MEDIA_DECODE_FAILED | Reason.MEDIA_FORMAT_UNSUPPORTED:
            what = fault.message.partition(": ")[2] or fault.message
            return f"Failed to load image: {what}"
    return fault.message
