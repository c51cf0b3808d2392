"""Which frames of a video a model sees, and at what times.

Sources: `sample_frames` of transformers' `Qwen3VLVideoProcessor` and
`Qwen2VLVideoProcessor`, `_calculate_timestamps` of its `Qwen3VLProcessor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from router.vision.settings import Reader

UNKNOWN_FPS = 24.0
# Of float32, on processors with AVX2. Others may differ by a frame from some 20,000 frames on.
_LANES = 8


@dataclass(frozen=True, slots=True)
class Sampling:
    """A checkpoint's rule: frames a second and the bounds on their number, or one number for all.

    `num_frames` is 0 where frames go by the second.
    """

    fps: float
    min_frames: int
    max_frames: int
    num_frames: int

    @classmethod
    def read(cls, read: Reader) -> Sampling:
        """From a video processor's settings; the defaults are the processors' own."""
        read.get("do_sample_frames")
        read.excludes("num_frames", "fps")
        num_frames = 0
        if read.get("num_frames") is not None:
            num_frames = read.positive("num_frames")
        return cls(
            read.number("fps", 2.0),
            read.positive("min_frames", 4),
            read.positive("max_frames", 768),
            num_frames,
        )

    def spread(self, total: int, fps: float, wanted_fps: float | None) -> tuple[int, ...]:
        """Qwen3-VL: evenly from the first frame to the last, in whole numbers.

        `fps` is the video's own; `wanted_fps` replaces the checkpoint's rate.
        """
        if self.num_frames and not wanted_fps:
            return spread_evenly(total, self.num_frames)
        count = int(total / fps * (wanted_fps or self.fps))
        return spread_evenly(total, min(max(count, self.min_frames), self.max_frames, total))

    def stepped(
        self, total: int, fps: float, wanted_fps: float | None, multiple: int
    ) -> tuple[int, ...]:
        """Qwen2-VL: in equal steps from the first frame on, a multiple of `multiple` of them.

        None at all where the video has fewer than the checkpoint wants.
        """
        if self.num_frames and not wanted_fps:
            fixed = round(self.num_frames / multiple) * multiple
            return _steps(total, fixed if fixed <= total else 0)
        most = min(self.max_frames, total) // multiple * multiple
        count = min(max(total / fps * (wanted_fps or self.fps), self.min_frames), most, total)
        return _steps(total, int(count // multiple) * multiple)


def _steps(total: int, count: int) -> tuple[int, ...]:
    """Frame indices from 0 on, `total` / `count` apart: those of torch's `arange`.

    By rounding it may have one more, which is left out where it is behind the last frame: no
    reference has an answer then.
    """
    if count == 0:
        return ()
    step = total / count
    places = np.arange(ceil(total / step))
    # Written eight at a time: the first of them in float32, the others from there in float64.
    ahead = places % _LANES
    ahead[len(places) // _LANES * _LANES :] = 0
    begins = ((places - ahead) * step).astype(np.float32)
    steps = (begins + ahead * step).astype(np.float32).astype(np.int32)
    return tuple(int(i) for i in steps if i < total)


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
