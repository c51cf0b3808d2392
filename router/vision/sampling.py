"""Which frames of a video a model sees, and at what times.

Sources: `sample_frames` of transformers' `Qwen3VLVideoProcessor` and
`Qwen2VLVideoProcessor`, `_calculate_timestamps` of its `Qwen3VLProcessor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from router.vision.settings import Reader

UNKNOWN_FPS = 24.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """A checkpoint's rule: frames a second, and the bounds on their number."""

    fps: float
    min_frames: int
    max_frames: int

    @classmethod
    def read(cls, read: Reader) -> Sampling:
        """From a video_preprocessor_config.json; the defaults are the processors' own."""
        read.get("do_sample_frames")
        return cls(
            read.number("fps", 2.0),
            read.positive("min_frames", 4),
            read.positive("max_frames", 768),
        )

    def spread(self, total: int, fps: float, wanted_fps: float | None) -> tuple[int, ...]:
        """Qwen3-VL: evenly from the first frame to the last, in whole numbers.

        `fps` is the video's own; `wanted_fps` replaces the checkpoint's rate.
        """
        count = int(total / fps * (wanted_fps or self.fps))
        return spread_evenly(total, min(max(count, self.min_frames), self.max_frames, total))

    def stepped(
        self, total: int, fps: float, wanted_fps: float | None, multiple: int
    ) -> tuple[int, ...]:
        """Qwen2-VL: in equal steps from the first frame on, a multiple of `multiple` of them."""
        most = min(self.max_frames, total) // multiple * multiple
        count = min(max(total / fps * (wanted_fps or self.fps), self.min_frames), most, total)
        count = int(count // multiple) * multiple
        if count == 0:
            return ()
        # The reference steps in float32.
        steps = np.arange(0, total, total / count, dtype=np.float32)
        return tuple(int(i) for i in steps.astype(np.int32))


def spread_evenly(total: int, count: int) -> tuple[int, ...]:
    """`count` frame indices from 0 to `total` - 1, halves rounded to the even one."""
    return tuple(int(i) for i in np.linspace(0, total - 1, count).round())


def timestamps(frames: Sequence[int], fps: float, temporal: int) -> tuple[float, ...]:
    """Seconds of each temporal patch: the mean of its first and last frame's.

    A last patch that is not full repeats its last frame.
    """
    times = [frame / fps for frame in frames]
    times += times[-1:] * (-len(times) % temporal)
    return tuple(
        (times[start] + times[start + temporal - 1]) / 2 for start in range(0, len(times), temporal)
    )
