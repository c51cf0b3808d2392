"""Qwen2-VL and Qwen2.5-VL: a grid of patches at the picture's own size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, floor, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from router.faults import Fault, Reason
from router.vision.files import ModelFiles, Settings
from router.vision.geometry import Draw, Patches, whole
from router.vision.plan import Claim, ItemPlan, Modality, ModelSpec, Replacement, TensorNames
from router.vision.sampling import UNKNOWN_FPS, Sampling, timestamps
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
        if self.temporal != 2:
            raise ValueError(f"{where}: temporal_patch_size {self.temporal} is not supported")
        self.merge = read.positive("merge_size")
        self.min_pixels, self.max_pixels = self._bounds(read)
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"{where}: the smallest size is over the largest")
        read.only("do_resize", True)
        read.only("resample", 3)
        self.normalization = read.normalization()
        self.read = read

    def _bounds(self, read: Reader) -> tuple[int, int]:
        """The least and the most pixels."""
        size = read.nested("size")
        # The older spelling wins where both stand, as it does in the reference.
        return (
            _either(read, "min_pixels", size, "shortest_edge"),
            _either(read, "max_pixels", size, "longest_edge"),
        )

    @property
    def factor(self) -> int:
        return self.patch * self.merge

    @property
    def patch_values(self) -> int:
        return 3 * self.temporal * self.patch * self.patch

    def patches(self, size: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of patches of a (height, width)."""
        return size[0] // self.patch, size[1] // self.patch

    def draw(self, source: tuple[int, int], size: tuple[int, int], *, copies: int) -> Draw:
        """The whole picture of `source` (width, height) at `size` (height, width)."""
        height, width = size
        layout = Patches(*self.patches(size), self.patch, self.merge, self.temporal, copies)
        return Draw(
            crop=whole(*source),
            height=height,
            width=width,
            window=whole(width, height),
            filter="bicubic",
            rule="torch",
            layout=layout,
        )

    def frame_draws(
        self, source: tuple[int, int], size: tuple[int, int], frames: int
    ) -> tuple[Draw, ...]:
        """One draw a frame, the last repeated until temporal patches are full."""
        rows, columns = self.patches(size)
        patch_of_time = rows * columns * self.patch_values
        frame_in_patch = self.patch * self.patch
        # All but the place is the same for hundreds of frames.
        one = self.draw(source, size, copies=1)
        parts = (one.crop, one.height, one.width, one.window, one.filter, one.rule, one.layout)
        return tuple(
            Draw(
                *parts,
                start=slot // self.temporal * patch_of_time + slot % self.temporal * frame_in_patch,
            )
            for slot in range(frames + -frames % self.temporal)
        )


class QwenVideo(QwenVision):
    """A video processor: frame sampling and a pixel budget besides."""

    # What the processor's class sets where the file says nothing.
    most_tokens = 128_000

    def __init__(self, settings: Settings, where: str) -> None:
        super().__init__(settings, where)
        self.sampling = Sampling.read(self.read)
        self.capped = self.read.switch("cap_pixels_per_frame", default=False)
        self.max_tokens = self.read.positive("max_video_tokens", self.most_tokens)


class Qwen2VL(ModelSpec):
    """Images and videos of Qwen2-VL checkpoints."""

    family = "qwen2_vl"
    video_settings: type[QwenVideo] = QwenVideo

    def __init__(self, files: ModelFiles) -> None:
        config, tokens = files.config, files.token_ids
        self._image = QwenVision(files.preprocessor_config, files.image_file)
        self.normalization = self._image.normalization
        self.warnings = self._image.read.warnings()
        image = model_token(config, tokens, "image_token_id", "<|image_pad|>")
        self.anchor_ids: Mapping[Modality, int] = {"image": image}
        self.modalities: frozenset[Modality] = frozenset({"image"})
        # A worker may take videos whose settings we lack.
        if "video_token_id" in config or "<|video_pad|>" in tokens:
            video = model_token(config, tokens, "video_token_id", "<|video_pad|>")
            self.anchor_ids = {"image": image, "video": video}
        self._video: QwenVideo | None = None
        if files.video_preprocessor_config:
            self._video = self.video_settings(files.video_preprocessor_config, files.video_file)
            self.video_normalization = self._video.normalization
            # One file may be that of both processors.
            told = (*self.warnings, *self._video.read.warnings())
            self.warnings = tuple(dict.fromkeys(told))
            self.modalities = frozenset(self.anchor_ids)
        self._check_against_model(config)
        self.placeholder_ids = self.anchor_ids
        self.anchor_texts: Mapping[Modality, str] = {
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>",
        }

    def _check_against_model(self, config: Settings) -> None:
        """The encoder's patch shape in config.json must be the processors'."""
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping):
            return
        for processor in (self._image, self._video):
            if processor is None:
                continue
            for key, ours in (
                ("patch_size", processor.patch),
                ("spatial_patch_size", processor.patch),
                ("temporal_patch_size", processor.temporal),
                ("spatial_merge_size", processor.merge),
            ):
                theirs = vision.get(key)
                if theirs is not None and theirs != ours:
                    raise ValueError(
                        f"the processor and config.json differ: {key} {ours} and {theirs}"
                    )

    def plan_image(
        self, width: int, height: int, *, index: int, max_long_side: int | None = None
    ) -> ItemPlan:
        check_aspect_ratio(width, height, index)
        vision = self._image
        free = size = self._image_size(width, height)
        if max_long_side is not None:
            size = self._image_size(*shrunk(width, height, max_long_side, vision.factor))
        rows, columns = vision.patches(size)
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
            hint=f"max_long_side={max_long_side}" if size != free else "",
        )

    def _image_size(self, width: int, height: int) -> tuple[int, int]:
        vision = self._image
        return smart_resize(height, width, vision.factor, vision.min_pixels, vision.max_pixels)

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
        vision = self._video
        if vision is None:
            raise self.unsupported("video", index)
        rate = fps or UNKNOWN_FPS
        frames = self._sample(vision, total_frames, rate, sample_fps)
        if len(frames) < vision.temporal:
            least = max(vision.temporal, vision.sampling.num_frames)
            raise Fault.of_item(
                Reason.MEDIA_FORMAT_UNSUPPORTED,
                index,
                f"a video of {total_frames} frames is too short, the model takes at least {least}",
                frames=total_frames,
                limit=least,
            )
        check_aspect_ratio(width, height, index)
        hints = []
        if sample_fps is not None and frames != self._sample(vision, total_frames, rate, None):
            hints.append(f"fps={sample_fps!r}")
        free = size = self._frame_size(vision, len(frames), width, height)
        if max_long_side is not None:
            bounded = shrunk(width, height, max_long_side, vision.factor)
            size = self._frame_size(vision, len(frames), *bounded)
        if size != free:
            hints.append(f"max_long_side={max_long_side}")
        rows, columns = vision.patches(size)
        draws = vision.frame_draws((width, height), size, len(frames))
        grid = (len(draws) // vision.temporal, rows, columns)
        patches = grid[0] * rows * columns
        plan = ItemPlan(
            modality="video",
            index=index,
            source_width=width,
            source_height=height,
            width=size[1],
            height=size[0],
            grid=grid,
            draws=draws,
            output_shape=(patches, vision.patch_values),
            feature_tokens=patches // vision.merge**2,
            prompt_tokens=0,
            frames=frames,
            timestamps=timestamps(frames, rate, vision.temporal),
            seconds_per_frame=total_frames / rate / len(frames),
            hint=",".join(hints),
        )
        return replace(plan, prompt_tokens=len(self.replacement(plan).ids) + 2)

    def _sample(
        self, vision: QwenVideo, total: int, fps: float, sample_fps: float | None
    ) -> tuple[int, ...]:
        return vision.sampling.stepped(total, fps, sample_fps, vision.temporal)

    def _frame_size(
        self, vision: QwenVideo, frames: int, width: int, height: int
    ) -> tuple[int, int]:
        """The (height, width) of each frame; the area's bounds are for one frame."""
        most = vision.max_pixels
        if vision.capped:
            # 0.9 and 1.05 are the reference's margins.
            shared = int(vision.max_tokens * vision.factor**2 * 0.9) * vision.temporal // frames
            most = max(min(most, shared), int(vision.min_pixels * 1.05))
        return smart_resize(height, width, vision.factor, vision.min_pixels, most)

    def replacement(self, plan: ItemPlan) -> Replacement:
        tokens = plan.feature_tokens
        ids = np.full(tokens, self.placeholder_ids[plan.modality], np.uint32)
        return Replacement(ids, 0, tokens)

    def tensor_names(self, modality: Modality) -> TensorNames:
        grid, patches = f"{modality}_grid_thw", f"patches_per_{modality}"
        vision = self._image if modality == "image" else self._video
        assert vision is not None
        return TensorNames(
            pixel_dims=(vision.patch_values,),
            flat=(("pixel_values", patches),),
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
        if min(t, rows, columns) < 1 or (modality == "image" and t != 1):
            raise ValueError("the grid is not that of one item")
        if rows % merge or columns % merge:
            raise ValueError(f"the grid is not a multiple of {merge}")
        patches = t * rows * columns
        if side[f"patches_per_{modality}"][0] != patches:
            raise ValueError("the number of patches is not that of the grid")
        return Claim(patches, patches // merge**2)


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL: as Qwen2-VL, and a video's positions need its pace."""

    family = "qwen2_5_vl"

    def tensor_names(self, modality: Modality) -> TensorNames:
        names = super().tensor_names(modality)
        if modality == "image":
            return names
        return replace(
            names,
            batched=(*names.batched, "second_per_grid_ts"),
            keep_on_cpu=(*names.keep_on_cpu, "second_per_grid_ts"),
            floats=("second_per_grid_ts",),
        )

    def side_tensors(self, plans: Sequence[ItemPlan]) -> dict[str, npt.NDArray[Any]]:
        side = super().side_tensors(plans)
        if plans[0].modality == "video" and self._video is not None:
            seconds = [plan.seconds_per_frame * self._video.temporal for plan in plans]
            side["second_per_grid_ts"] = np.array(seconds, np.float32)
        return side

    def side_shapes(self, modality: Modality) -> Mapping[str, tuple[int, ...]]:
        shapes = super().side_shapes(modality)
        return shapes if modality == "image" else {**shapes, "second_per_grid_ts": ()}


def _either(read: Reader, key: str, size: Reader, size_key: str) -> int:
    if read.get(key) is not None:
        return read.positive(key)
    return size.positive(size_key)
