"""Qwen2-VL and Qwen2.5-VL: a grid of patches at the picture's own size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from router.faults import Fault, Reason
from router.vision.files import ModelFiles, Settings
from router.vision.geometry import Draw, Patches, whole
from router.vision.plan import Claim, ItemPlan, Modality, ModelSpec, Replacement, TensorNames
from router.vision.settings import Reader, model_token, shrunk

MAX_ASPECT_RATIO = 200


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """The (height, width) that a picture is resized to.

    Each side goes to the nearest multiple of `factor` (halves to the even
    one); an area out of bounds is brought back with the aspect ratio kept.
    Source: transformers `models/qwen2_vl/image_processing_qwen2_vl.py`.
    """
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        beta = sqrt((height * width) / max_pixels)
        new_height = max(factor, floor(height / beta / factor) * factor)
        new_width = max(factor, floor(width / beta / factor) * factor)
    elif new_height * new_width < min_pixels:
        beta = sqrt(min_pixels / (height * width))
        new_height = ceil(height * beta / factor) * factor
        new_width = ceil(width * beta / factor) * factor
    return new_height, new_width


def check_aspect_ratio(width: int, height: int, index: int) -> None:
    """Raise Fault MEDIA_ASPECT_RATIO beyond what the family's processors take."""
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_ASPECT_RATIO:
        raise Fault.of_item(
            Reason.MEDIA_ASPECT_RATIO,
            index,
            f"the aspect ratio of {width}x{height} is over the model's limit of {MAX_ASPECT_RATIO}",
            width=width,
            height=height,
            limit=MAX_ASPECT_RATIO,
        )


class QwenVision:
    """The settings of one Qwen image or video processor."""

    def __init__(self, settings: Settings, where: str) -> None:
        if not settings:
            raise ValueError(f"{where} is missing")
        read = Reader(settings, where)
        self.patch = read.positive("patch_size")
        self.temporal = read.positive("temporal_patch_size")
        self.merge = read.positive("merge_size")
        size = read.nested("size")
        # The older spelling wins where both stand, as it does in the reference.
        self.min_pixels = _either(read, "min_pixels", size, "shortest_edge")
        self.max_pixels = _either(read, "max_pixels", size, "longest_edge")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"{where}: the smallest size is over the largest")
        read.only("do_resize", True)
        read.only("resample", 3)
        self.normalization = read.normalization()
        self.read = read

    @property
    def factor(self) -> int:
        return self.patch * self.merge

    @property
    def patch_values(self) -> int:
        return 3 * self.temporal * self.patch * self.patch

    def draw(
        self, source: tuple[int, int], size: tuple[int, int], *, copies: int, start: int = 0
    ) -> Draw:
        """The whole picture of `source` (width, height) at `size` (height, width)."""
        height, width = size
        layout = Patches(
            height // self.patch, width // self.patch, self.patch, self.merge, self.temporal, copies
        )
        return Draw(
            crop=whole(*source),
            height=height,
            width=width,
            window=whole(width, height),
            filter="bicubic",
            rule="torch",
            layout=layout,
            start=start,
        )


class Qwen2VL(ModelSpec):
    """Images and videos of Qwen2-VL and Qwen2.5-VL checkpoints."""

    family = "qwen2_vl"

    def __init__(self, files: ModelFiles) -> None:
        config, tokens = files.config, files.token_ids
        self._image = QwenVision(files.preprocessor_config, "preprocessor_config.json")
        self.normalization = self._image.normalization
        self._check_against_model(config)
        image = model_token(config, tokens, "image_token_id", "<|image_pad|>")
        self.modalities: frozenset[Modality] = frozenset({"image"})
        self.anchor_ids: Mapping[Modality, int] = {"image": image}
        self.placeholder_ids = self.anchor_ids
        self.anchor_texts: Mapping[Modality, str] = {
            "image": "<|vision_start|><|image_pad|><|vision_end|>"
        }
        self.warnings = self._image.read.warnings()

    def _check_against_model(self, config: Settings) -> None:
        """The encoder's patch shape in config.json must be the processor's."""
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping):
            return
        for key, ours in (
            ("patch_size", self._image.patch),
            ("spatial_patch_size", self._image.patch),
            ("temporal_patch_size", self._image.temporal),
            ("spatial_merge_size", self._image.merge),
        ):
            theirs = vision.get(key)
            if theirs is not None and theirs != ours:
                raise ValueError(
                    f"preprocessor_config.json and config.json differ: {key} {ours} and {theirs}"
                )

    def plan_image(
        self, width: int, height: int, *, index: int, max_long_side: int | None = None
    ) -> ItemPlan:
        check_aspect_ratio(width, height, index)
        vision = self._image
        size = self._image_size(width, height)
        hint = ""
        if max_long_side is not None:
            free = size
            size = self._image_size(*shrunk(width, height, max_long_side, vision.factor))
            hint = f"max_long_side={max_long_side}" if size != free else ""
        rows, columns = size[0] // vision.patch, size[1] // vision.patch
        tokens = rows * columns // vision.merge**2
        return ItemPlan(
            modality="image",
            index=index,
            source_width=width,
            source_height=height,
            width=size[1],
            height=size[0],
            grid=(1, rows, columns),
            draws=(vision.draw((width, height), size, copies=vision.temporal),),
            output_shape=(rows * columns, vision.patch_values),
            feature_tokens=tokens,
            prompt_tokens=tokens + 2,
            hint=hint,
        )

    def _image_size(self, width: int, height: int) -> tuple[int, int]:
        vision = self._image
        return smart_resize(height, width, vision.factor, vision.min_pixels, vision.max_pixels)

    def replacement(self, plan: ItemPlan) -> Replacement:
        tokens = plan.feature_tokens
        ids = np.full(tokens, self.placeholder_ids[plan.modality], np.uint32)
        return Replacement(ids, 0, tokens)

    def tensor_names(self, modality: Modality) -> TensorNames:
        pixels = "pixel_values" if modality == "image" else "pixel_values_videos"
        grid, patches = f"{modality}_grid_thw", f"patches_per_{modality}"
        return TensorNames(
            pixels=pixels,
            pixel_dims=(self._image.patch_values,),
            flat=((pixels, patches),),
            batched=(grid, patches),
            keep_on_cpu=(grid,),
        )

    def side_tensors(self, plans: Sequence[ItemPlan]) -> dict[str, npt.NDArray[Any]]:
        modality = plans[0].modality
        return {
            f"{modality}_grid_thw": np.array([plan.grid for plan in plans], np.int64),
            f"patches_per_{modality}": np.array([plan.output_shape[0] for plan in plans], np.int64),
        }

    def side_shapes(self, modality: Modality) -> Mapping[str, tuple[int, ...]]:
        return {f"{modality}_grid_thw": (3,), f"patches_per_{modality}": ()}

    def claim(
        self, modality: Modality, side: Mapping[str, Sequence[int]], pixels: tuple[int, ...]
    ) -> Claim:
        t, rows, columns = side[f"{modality}_grid_thw"]
        merge = self._image.merge
        if min(t, rows, columns) < 1:
            raise ValueError("the grid is not positive")
        if rows % merge or columns % merge:
            raise ValueError(f"the grid is not a multiple of {merge}")
        patches = t * rows * columns
        if side[f"patches_per_{modality}"][0] != patches:
            raise ValueError("the number of patches is not that of the grid")
        return Claim(patches, patches // merge**2)


def _either(read: Reader, key: str, size: Reader, size_key: str) -> int:
    if read.get(key) is not None:
        return read.positive(key)
    return size.positive(size_key)
