"""What a picture becomes, decided from sizes alone.

A plan is made from a width and a height, before a pixel is decoded: what is
too large, how many tokens it costs and how much memory it takes are known
while it can still be refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from router.faults import Fault, Reason
from router.vision.backend.base import Backend
from router.vision.geometry import Draw
from router.vision.ids import among
from router.vision.values import Normalization, Table, fill_value, value_table

Modality = Literal["image", "video"]
DType = Literal["uint8", "float32", "bfloat16", "float16"]
_ITEMSIZE: Mapping[DType, int] = {"uint8": 1, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PixelFormat:
    """How pixel values travel.

    `normalized` false means raw 0..255 values, for a worker that normalises on
    its device. bfloat16 is held in numpy as uint16 bit patterns.
    """

    dtype: DType
    normalized: bool

    def __post_init__(self) -> None:
        if self.dtype == "uint8" and self.normalized:
            raise ValueError("normalised pixels do not fit uint8")

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self.dtype]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """One media item, planned.

    `width` and `height` are those of the resized picture (or of the canvas it
    is cut from); `grid` is the family's own shape of it: frames, patch rows
    and patch columns for the Qwens, tile rows and columns elsewhere.
    `feature_tokens` counts the embeddings that the encoder returns,
    `prompt_tokens` every prompt position the item takes. `hint` names the
    client's wish if it changed anything, as it then belongs to the identity.

    A video lists the source frames to take (in rising order; the draws after
    the last one repeat it), one timestamp in seconds a temporal patch, and how
    many seconds lie between sampled frames.
    """

    modality: Modality
    index: int
    source_width: int
    source_height: int
    width: int
    height: int
    grid: tuple[int, ...]
    draws: tuple[Draw, ...]
    output_shape: tuple[int, ...]
    feature_tokens: int
    prompt_tokens: int
    background: int | None = None
    frames: tuple[int, ...] = ()
    timestamps: tuple[float, ...] = ()
    seconds_per_frame: float = 0.0
    hint: str = ""

    def output_bytes(self, pixel_format: PixelFormat) -> int:
        return prod(self.output_shape) * pixel_format.itemsize


@dataclass(frozen=True, slots=True)
class Replacement:
    """The tokens that stand for one item.

    `offset` and `length` are the item's placeholder range inside `ids`.
    """

    ids: npt.NDArray[np.uint32]
    offset: int
    length: int

    def with_range(self, placeholders: npt.NDArray[np.uint32]) -> Replacement:
        """The same with another placeholder range, of whatever length."""
        before, after = self.ids[: self.offset], self.ids[self.offset + self.length :]
        ids = np.concatenate([before, placeholders, after])
        return Replacement(ids, self.offset, len(placeholders))


@dataclass(frozen=True, slots=True)
class Expanded:
    """Prompt ids (uint32) after expansion and each item's (offset, length)."""

    ids: npt.NDArray[np.uint32]
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """Rows of the pixel tensor and encoder embeddings that an item accounts for."""

    rows: int
    feature_tokens: int


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How one modality's batch is written on the wire.

    `flat` maps a tensor to the tensor of sizes that cuts it into items,
    `batched` counts items along the first dimension, `keep_on_cpu` stays in
    host memory; `floats` are the small tensors that are not integers. The pixel
    tensor is always called pixel_values (a worker renames a video's itself);
    `pixel_dims` is the shape of one row of it, 0 where any size may stand.
    """

    pixel_dims: tuple[int, ...]
    flat: tuple[tuple[str, str], ...] = ()
    batched: tuple[str, ...] = ()
    keep_on_cpu: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()


def anchors_amiss(found: int, items: int) -> str:
    """What is told of a prompt whose anchors are not those of its media items."""
    if found != items:
        return f"input_ids hold {found} media anchors for {items} media items"
    return "the media anchors in input_ids are in another order of modalities than the media items"


class ModelSpec(ABC):
    """A family of models with the settings of one checkpoint.

    Subclasses are immutable after construction and safe to share between
    threads.
    """

    family: str
    modalities: frozenset[Modality]
    # Modalities whose anchor a worker's own processor expands.
    worker_expandable: frozenset[Modality] = frozenset()
    # Modality -> the one token that stands for an item in an unexpanded prompt.
    anchor_ids: Mapping[Modality, int]
    anchor_texts: Mapping[Modality, str]
    # Modality -> the token that embeddings replace (`im_token_id`).
    placeholder_ids: Mapping[Modality, int]
    normalization: Normalization
    # That of videos, where their processor has settings of its own.
    video_normalization: Normalization | None = None
    # Settings of the files that were not understood and may change pixels.
    warnings: tuple[str, ...] = ()

    def anchor_text(self, modality: Modality) -> str:
        """How a chat prompt writes the anchor of `modality`."""
        return self.anchor_texts[modality]

    @abstractmethod
    def plan_image(
        self, width: int, height: int, *, index: int, max_long_side: int | None = None
    ) -> ItemPlan:
        """Plan an upright picture of `width` x `height`.

        `max_long_side` plans as though the picture had first been shrunk to
        that; pixels still come from the original in one resize. Raises Fault
        MEDIA_ASPECT_RATIO or MEDIA_TOO_LARGE.
        """

    def plan_video(
        self,
        width: int,
        height: int,
        *,
        index: int,
        total_frames: int,
        fps: float | None,
        sample_fps: float | None = None,
        max_long_side: int | None = None,
    ) -> ItemPlan:
        """Plan a video of `total_frames`; `fps` is None where the file says none.

        `sample_fps` is the client's wish. Raises Fault as `plan_image` does,
        and MULTIMODAL_NOT_SUPPORTED where the family takes no video.
        """
        raise self.unsupported("video", index)

    @abstractmethod
    def replacement(self, plan: ItemPlan) -> Replacement:
        """The tokens that replace the anchor of a planned item."""

    @abstractmethod
    def tensor_names(self, modality: Modality) -> TensorNames:
        """Names and kinds of the tensors of one modality's batch."""

    @abstractmethod
    def side_tensors(self, plans: Sequence[ItemPlan]) -> dict[str, npt.NDArray[Any]]:
        """The batch's small tensors by wire name, beside the pixels."""

    @abstractmethod
    def side_shapes(self, modality: Modality) -> Mapping[str, tuple[int, ...]]:
        """The small tensors a batch must have: name -> shape of one item's entry."""

    def shared_tensors(self, modality: Modality) -> frozenset[str]:
        """Small tensors that are the same for all items, and may be left out."""
        return frozenset()

    @abstractmethod
    def claim(
        self, modality: Modality, side: Mapping[str, Sequence[int]], pixels: tuple[int, ...]
    ) -> Claim:
        """What one item's entries of the small tensors say about its size.

        Used to check tensors that somebody else built; `pixels` is the shape of
        the batch's pixel tensor, for families whose sizes are in it. Raises
        ValueError when no item could have these entries.
        """

    def interleaves(self, modality: Modality) -> bool:
        """Whether other tokens stand between an item's placeholders, inside its range."""
        return False

    def unsupported(self, modality: Modality, index: int) -> Fault:
        return Fault.of_item(
            Reason.MULTIMODAL_NOT_SUPPORTED,
            index,
            f"{self.family} takes no {modality}",
            modality=modality,
        )

    def table(self, pixel_format: PixelFormat, modality: Modality = "image") -> Table:
        """What each of the 256 levels becomes, per channel."""
        rule = self.normalization
        if modality == "video" and self.video_normalization is not None:
            rule = self.video_normalization
        return value_table(rule, pixel_format.dtype, pixel_format.normalized)

    def pack(
        self,
        plan: ItemPlan,
        pixels: npt.NDArray[np.uint8],
        pixel_format: PixelFormat,
        backend: Backend,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """The pixel tensor of one item, of `plan.output_shape`.

        `pixels` is uint8 [height, width, 3], upright RGB; a video's are
        [n, height, width, 3], one for each of `plan.frames`. Blocks, mostly
        without the GIL.
        """
        if out is None:
            out = backend.empty(plan.output_shape, pixel_format.numpy_dtype)
        flat = out.reshape(-1)
        table = self.table(pixel_format, plan.modality)
        if plan.background is not None:
            fill_value(flat, plan.output_shape, table, plan.background)
        if plan.modality == "image":
            for draw in plan.draws:
                backend.draw(pixels, draw, table, flat)
        else:
            for position, draw in enumerate(plan.draws):
                backend.draw(pixels[min(position, len(pixels) - 1)], draw, table, flat)
        return out

    def expand(
        self,
        input_ids: Sequence[int] | npt.NDArray[Any],
        plans: Sequence[ItemPlan],
        known: Mapping[int, npt.NDArray[np.uint32]] | None = None,
    ) -> Expanded:
        """Replace each anchor by its item's tokens, in prompt order.

        `known` holds placeholder ranges that were seen, by the item's place
        in `plans`; they stand instead of what the plan says.

        Raises Fault ANCHOR_MISMATCH unless the prompt holds exactly one anchor
        of the right modality for each item; a run that was expanded already
        counts as many anchors.
        """
        ids = np.asarray(input_ids, dtype=np.uint32)
        positions = self._anchors(ids, plans)
        pieces: list[npt.NDArray[np.uint32]] = []
        ranges: list[tuple[int, int]] = []
        taken = length = 0
        for place, (position, plan) in enumerate(zip(positions, plans, strict=True)):
            new = self.replacement(plan)
            if known and place in known:
                new = new.with_range(known[place])
            pieces += [ids[taken:position], new.ids]
            length += position - taken
            ranges.append((length + new.offset, new.length))
            length += len(new.ids)
            taken = position + 1
        pieces.append(ids[taken:])
        return Expanded(np.concatenate(pieces), tuple(ranges))

    def _anchors(self, ids: npt.NDArray[np.uint32], plans: Sequence[ItemPlan]) -> list[int]:
        watched = {token: modality for modality, token in self.anchor_ids.items()}
        positions = np.flatnonzero(among(ids, watched))
        # A stray run may be as long as the prompt: compare counts, not lists, first.
        if len(positions) == len(plans) and all(
            watched[int(ids[at])] == plan.modality
            for at, plan in zip(positions, plans, strict=True)
        ):
            self._refuse_expanded(ids)
            return [int(at) for at in positions]
        metadata = {"found": str(len(positions)), "items": str(len(plans))}
        for modality in sorted(self.anchor_ids):
            found = int(np.count_nonzero(ids == self.anchor_ids[modality]))
            metadata[f"found_{modality}"] = str(found)
            metadata[f"items_{modality}"] = str(sum(p.modality == modality for p in plans))
        raise Fault(
            Reason.ANCHOR_MISMATCH,
            anchors_amiss(len(positions), len(plans)),
            metadata=metadata,
        )

    def _refuse_expanded(self, ids: npt.NDArray[np.uint32]) -> None:
        """Placeholders that are no anchors can only come from an earlier expansion."""
        stray = set(self.placeholder_ids.values()) - set(self.anchor_ids.values())
        found = int(np.count_nonzero(among(ids, stray)))
        if found:
            raise Fault(
                Reason.ANCHOR_MISMATCH,
                f"input_ids hold {found} placeholder tokens that were expanded already",
                metadata={"expanded": str(found)},
            )
