"""Qwen3-VL, and the Qwen3.5 and 3.6 models that see: patches, and timestamps in videos.

A vLLM worker expands this family's anchors by itself, exactly as the chat
template writes them, for images and for videos.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, floor, sqrt

import numpy as np
import numpy.typing as npt

from router.vision.files import ModelFiles
from router.vision.models.qwen2_vl import Qwen2VL, QwenVideo
from router.vision.plan import ItemPlan, Modality, Replacement
from router.vision.settings import Reader, model_token


def smart_resize_video(
    frames: int,
    height: int,
    width: int,
    temporal: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """The (height, width) of each frame when the bounds are for all frames together.

    Source: transformers `models/qwen3_vl/video_processing_qwen3_vl.py`.
    """
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    volume = round(frames / temporal) * temporal * new_height * new_width
    if volume > max_pixels:
        beta = sqrt((frames * height * width) / max_pixels)
        new_height = max(factor, floor(height / beta / factor) * factor)
        new_width = max(factor, floor(width / beta / factor) * factor)
    elif volume < min_pixels:
        beta = sqrt(min_pixels / (frames * height * width))
        new_height = ceil(height * beta / factor) * factor
        new_width = ceil(width * beta / factor) * factor
    return new_height, new_width


class Qwen3Video(QwenVideo):
    """A video processor that has no older spelling of its pixel bounds."""

    most_tokens = 768

    def _bounds(self, read: Reader) -> tuple[int, int]:
        if read.get("size") is None:  # what the reference's class sets
            return 131_072, 786_432
        size = read.nested("size")
        return size.positive("shortest_edge"), size.positive("longest_edge")


class Qwen3VL(Qwen2VL):
    """Images and videos of Qwen3-VL checkpoints."""

    family = "qwen3_vl"
    video_settings = Qwen3Video

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        self.worker_expandable = frozenset(self.anchor_ids)
        if self._video is None:
            return
        config, tokens = files.config, files.token_ids
        self._start = model_token(config, tokens, "vision_start_token_id", "<|vision_start|>")
        self._end = model_token(config, tokens, "vision_end_token_id", "<|vision_end|>")
        if files.encode is None:
            self._without_video("tokenizer.json is missing")
            return
        encode = files.encode
        # A clip has hundreds, the same ones as the next, and each is written more than once.
        self._stamp = lru_cache(maxsize=4096)(lambda text: np.array(encode(text), np.uint32))
        try:
            # Also loads the tokenizer here, in a thread, and not at the first video.
            self._stamp("<0.0 seconds>")
        except ValueError as error:
            self._without_video(str(error))

    def _without_video(self, why: str) -> None:
        """Images need no tokenizer, so they stay when timestamps cannot be written."""
        self._video = None
        self.modalities = frozenset({"image"})
        self.warnings += (f"videos are off, as their timestamps need a tokenizer: {why}",)

    def _sample(
        self, vision: QwenVideo, total: int, fps: float, sample_fps: float | None
    ) -> tuple[int, ...]:
        return vision.sampling.spread(total, fps, sample_fps)

    def _frame_size(
        self, vision: QwenVideo, frames: int, width: int, height: int
    ) -> tuple[int, int]:
        """The (height, width) of each frame; the area's bounds are for all together."""
        most = vision.max_pixels
        if vision.capped:
            share = min(vision.max_tokens * vision.factor**2, vision.max_pixels // frames)
            # 1.05 is the reference's margin.
            most = max(share, int(vision.min_pixels * 1.05)) * frames
        return smart_resize_video(
            frames, height, width, vision.temporal, vision.factor, vision.min_pixels, most
        )

    def replacement(self, plan: ItemPlan) -> Replacement:
        if plan.modality == "image":
            return super().replacement(plan)
        tokens = plan.feature_tokens // plan.grid[0]
        frame = np.full(tokens + 2, self.placeholder_ids["video"], np.uint32)
        frame[0], frame[-1] = self._start, self._end
        pieces: list[npt.NDArray[np.uint32]] = []
        for seconds in plan.timestamps:
            pieces += [self._stamp(f"<{seconds:.1f} seconds>"), frame]
        ids = np.concatenate(pieces)
        return Replacement(ids, 0, len(ids))

    def interleaves(self, modality: Modality) -> bool:
        return modality == "video"
