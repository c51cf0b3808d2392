"""Resampling weights, bit for bit those of the reference libraries.

Both torch's uint8 antialias path and Pillow resize in integers: float64
weights of a filter whose support grows with the downscale factor, normalised
and quantised, two one-dimensional passes with rounding to uint8 between them.
They differ in the precision of the weights and in which pass comes first.

Sources of the formulas: PyTorch `aten/src/ATen/native/cpu/UpSampleKernel.cpp`
(`_compute_index_ranges_int16_weights`), Pillow `src/libImaging/Resample.c`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np
import numpy.typing as npt

from router.vision.geometry import Filter, Rule

_SUPPORT: dict[Filter, float] = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
_PILLOW_PRECISION = 32 - 8 - 2
_TORCH_MAX_PRECISION = 22
# Weights take some twenty bytes for each pixel of the longer side; those of longer ones are
# made anew each time.
_LONGEST_KEPT = 1 << 16


@dataclass(frozen=True, slots=True)
class Taps:
    """The weights of one axis, for a run of output positions.

    Output i is `clip((sum_k weights[i, k] * in[first[i] + k] + half) >> precision)`
    with half = 2^(precision - 1) and k below `count[i]`. `first` and `count` are
    int32 [n], `weights` int32 [n, taps], zero from `count[i]` on.
    """

    first: npt.NDArray[np.int32]
    count: npt.NDArray[np.int32]
    weights: npt.NDArray[np.int32]
    precision: int

    def window(self, start: int, length: int) -> Taps:
        """The taps of `length` outputs from `start` on."""
        if start == 0 and length == len(self.first):
            return self
        end = start + length
        return Taps(
            self.first[start:end], self.count[start:end], self.weights[start:end], self.precision
        )

    def shifted(self, by: int) -> Taps:
        """The same taps over an input whose first `-by` positions were cut off."""
        return Taps(self.first + np.int32(by), self.count, self.weights, self.precision)


def taps(in_size: int, out_size: int, filter: Filter, rule: Rule) -> Taps:
    """The weights that take an axis of `in_size` pixels to `out_size`."""
    make = _made if max(in_size, out_size) > _LONGEST_KEPT else _kept
    return make(in_size, out_size, filter, rule)


def _made(in_size: int, out_size: int, filter: Filter, rule: Rule) -> Taps:
    scale = in_size / out_size
    stretch = max(scale, 1.0)
    support = _SUPPORT[filter] * stretch
    center = scale * (np.arange(out_size, dtype=np.float64) + 0.5)
    # C truncates towards zero; both bounds are positive after the clamp.
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    last = np.minimum((center + support + 0.5).astype(np.int64), in_size)
    count = np.minimum(last - first, ceil(support) * 2 + 1)
    steps = np.arange(int(count.max()), dtype=np.int64)
    distance = (steps[None, :] + first[:, None] - center[:, None] + 0.5) * (1.0 / stretch)
    weights = _KERNELS[filter](distance)
    weights[steps[None, :] >= count[:, None]] = 0.0
    total = np.zeros(out_size, dtype=np.float64)
    for step in range(weights.shape[1]):  # in the reference's order of summation
        total += weights[:, step]
    np.divide(weights, total[:, None], out=weights, where=total[:, None] != 0.0)
    precision = _PILLOW_PRECISION if rule != "torch" else _torch_precision(float(weights.max()))
    scaled = weights * float(1 << precision)
    quantised = np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)).astype(np.int32)
    return Taps(first.astype(np.int32), count.astype(np.int32), quantised, precision)


_kept = lru_cache(maxsize=64)(_made)


def vertical_first(rule: Rule, in_h: int, in_w: int, out_h: int, out_w: int) -> bool:
    """Whether `rule` runs the vertical pass before the horizontal one."""
    if rule == "torch" or out_h >= in_h:
        return False
    if rule == "pillow12":
        return in_h > 100 * in_w
    return in_h - out_h > 2 * (in_w - out_w)


def _torch_precision(largest: float) -> int:
    """The largest precision below 22 whose largest weight still fits int16."""
    precision = 0
    while precision < _TORCH_MAX_PRECISION:
        if int(0.5 + largest * (1 << (precision + 1))) >= 1 << 15:
            break
        precision += 1
    return precision


def _triangle(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = np.abs(x)
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _keys_cubic(x: npt.NDArray[np.float64], a: float = -0.5) -> npt.NDArray[np.float64]:
    x = np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: npt.NDArray[np.float64], a: float = 3.0) -> npt.NDArray[np.float64]:
    return np.where((x >= -a) & (x < a), _sinc(x) * _sinc(x / a), 0.0)


def _sinc(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    scaled = np.where(x == 0.0, 1.0, x * np.pi)
    return np.where(x == 0.0, 1.0, np.sin(scaled) / scaled)


_KERNELS: dict[Filter, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]] = {
    "bilinear": _triangle,
    "bicubic": _keys_cubic,
    "lanczos": _lanczos,
}
