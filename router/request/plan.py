"""What a Generate asks for: its prompt, and its media in prompt order.

Everything here is read off the request alone; no worker is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from router.faults import Fault, Reason
from router.media.source import MediaSource, Modality
from router.media.url import parse
from router.wire import common, engine

# Reading each item takes a while, and no worker is known to take nearly as many.
_MOST_ITEMS = 4096
# Choices of one request; what vLLM itself takes, unless it is told otherwise.
_MOST_CHOICES = 16384

MODALITIES = {common.IMAGE: "image", common.VIDEO: "video", common.AUDIO: "audio"}


class Part(Enum):
    """Why a media item cannot go to a worker as a reference."""

    INLINE_BYTES = "inline bytes"
    AUDIO = "audio"
    HINT_MAX_LONG_SIDE = "hint max_long_side_pixels"
    HINT_FPS = "hint fps"


@dataclass(frozen=True)
class MediaItem:
    """One reference of the request. Either `url` or `data` (the encoded file) is set.

    `scheme` is the url's, lower case, or `inline`.
    """

    index: int
    modality: str
    scheme: str
    url: str | None = None
    data: bytes | None = None
    max_long_side: int | None = None
    fps: float | None = None

    @property
    def source(self) -> MediaSource:
        """What media rooms load; audio, which they do not, is none of their kinds."""
        modality: Modality = "video" if self.modality == "video" else "image"
        return MediaSource(modality, url=self.url, data=self.data)

    @property
    def blocker(self) -> Part | None:
        """The first thing that only the router can do for this item."""
        if self.data is not None:
            return Part.INLINE_BYTES
        if self.modality == "audio":
            return Part.AUDIO
        if self.max_long_side is not None:
            return Part.HINT_MAX_LONG_SIDE
        if self.fps is not None:
            return Part.HINT_FPS
        return None


@dataclass(frozen=True)
class MediaPlan:
    """The request's media. `tensors` says that the client preprocessed them itself."""

    items: tuple[MediaItem, ...] = ()
    tensors: bool = False

    @property
    def schemes(self) -> frozenset[str]:
        """The URL schemes a worker must fetch if the items are forwarded."""
        return frozenset(item.scheme for item in self.items if item.data is None)

    @property
    def modalities(self) -> frozenset[str]:
        return frozenset(item.modality for item in self.items)

    @property
    def blocked(self) -> tuple[MediaItem, Part] | None:
        """The first item that cannot be forwarded, and why; None when all can."""
        for item in self.items:
            if (part := item.blocker) is not None:
                return item, part
        return None

    def count(self, modality: str) -> int:
        return sum(item.modality == modality for item in self.items)


_NO_MEDIA = MediaPlan()


def plan(request: engine.GenerateRequest, *, allow_transfer_params: bool = False) -> MediaPlan:
    """Reads the media of a request and refuses requests that no worker could serve.

    Raises `Fault`: INVALID_REQUEST, TRANSFER_PARAMS_FORBIDDEN, TOO_MANY_MEDIA_ITEMS,
    MEDIA_URL_INVALID, MEDIA_SCHEME_UNSUPPORTED, FILE_FORBIDDEN.
    """
    _check_input(request)
    if not allow_transfer_params:
        _refuse_transfer_params(request)
    has_refs = request.HasField("media_refs")
    has_tensors = request.HasField("mm_inputs")
    if request.extra_mm_inputs and not has_tensors:
        raise Fault(Reason.INVALID_REQUEST, "extra_mm_inputs is set without mm_inputs")
    if has_refs and has_tensors:
        raise Fault(Reason.INVALID_REQUEST, "media_refs and mm_inputs exclude each other")
    if not has_refs and not has_tensors:
        return _NO_MEDIA
    if request.WhichOneof("input") != "tokenized":
        field = "media_refs" if has_refs else "mm_inputs"
        raise Fault(Reason.INVALID_REQUEST, f"{field} needs a tokenized prompt, not text")
    if has_tensors:
        return MediaPlan(tensors=True)
    if not request.media_refs.items:
        raise Fault(Reason.INVALID_REQUEST, "media_refs has no items")
    count = len(request.media_refs.items)
    if count > _MOST_ITEMS:
        raise Fault(
            Reason.TOO_MANY_MEDIA_ITEMS,
            f"the request has {count} media items; the router takes at most {_MOST_ITEMS}",
            metadata={"items": str(count), "limit": str(_MOST_ITEMS)},
        )
    return MediaPlan(items=tuple(_item(i, ref) for i, ref in enumerate(request.media_refs.items)))


def _check_input(request: engine.GenerateRequest) -> None:
    kind = request.WhichOneof("input")
    if kind is None:
        raise Fault(Reason.INVALID_REQUEST, "the request has neither tokenized nor text input")
    if kind == "text" and not request.text:
        raise Fault(Reason.INVALID_REQUEST, "text is empty")
    if kind == "tokenized" and not request.tokenized.input_ids:
        raise Fault(Reason.INVALID_REQUEST, "tokenized.input_ids is empty")
    if request.sampling_params.n > _MOST_CHOICES:
        raise Fault(
            Reason.INVALID_REQUEST,
            f"sampling_params.n is {request.sampling_params.n}; at most {_MOST_CHOICES} are served",
        )


def _refuse_transfer_params(request: engine.GenerateRequest) -> None:
    for field in ("kv_transfer_params", "kv_transfer_params_json", "data_parallel_rank"):
        if request.HasField(field):
            raise Fault(
                Reason.TRANSFER_PARAMS_FORBIDDEN,
                f"{field} is not accepted from clients here",
                metadata={"field": field},
            )


def _item(index: int, ref: engine.MediaRef) -> MediaItem:
    modality = MODALITIES.get(ref.modality)
    if modality is None:
        raise Fault.of_item(Reason.INVALID_REQUEST, index, "modality is not set or not known")
    max_long_side, fps = _hints(index, ref)
    if ref.data:
        if ref.url:
            raise Fault.of_item(Reason.INVALID_REQUEST, index, "url and data exclude each other")
        return MediaItem(
            index, modality, "inline", data=ref.data, max_long_side=max_long_side, fps=fps
        )
    if not ref.url:
        raise Fault.of_item(Reason.MEDIA_URL_INVALID, index, "url is empty")
    # Read in full: a reference that is none must not be taken for one of a strange scheme.
    scheme = parse(ref.url, index=index).scheme
    return MediaItem(index, modality, scheme, url=ref.url, max_long_side=max_long_side, fps=fps)


def _hints(index: int, ref: engine.MediaRef) -> tuple[int | None, float | None]:
    max_long_side = fps = None
    if ref.hints.HasField("max_long_side_pixels"):
        max_long_side = ref.hints.max_long_side_pixels
        if max_long_side < 1:
            raise Fault.of_item(
                Reason.INVALID_REQUEST, index, "hints.max_long_side_pixels must be at least 1"
            )
    if ref.hints.HasField("fps"):
        fps = ref.hints.fps
        if not 0 < fps < 1000:
            raise Fault.of_item(
                Reason.INVALID_REQUEST, index, "hints.fps must be above 0 and below 1000"
            )
    return max_long_side, fps
