"""torch's bicubic interpolation of float pictures, without antialias, bit for bit.

One family needs it for one small view, so plain numpy will do. torch's
compiled loop fuses multiplications and additions, in the order below; each
fused step is done here in float64 and rounded once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_A = -0.75


def bicubic(picture: Floats, height: int, width: int) -> Floats:
    """float32 [channels, h, w] at `height` x `width`.

    Equals `torch.nn.functional.interpolate(mode="bicubic")` on a CPU with fused
    multiply-add, for sizes that divide (the weights are then exact).
    """
    rows, row_weights = _taps(picture.shape[1], height)
    columns, column_weights = _taps(picture.shape[2], width)
    lines = [
        _fused([picture[:, row][:, :, column] for column in columns], column_weights)
        for row in rows
    ]
    return _fused(lines, row_weights[:, :, None])


def _taps(in_size: int, out_size: int) -> tuple[list[npt.NDArray[np.int64]], Floats]:
    """Four positions an output, clamped to the picture, and their weights [4, out_size]."""
    at = in_size / out_size * (np.arange(out_size) + 0.5) - 0.5
    base = np.floor(at).astype(np.int64)
    t = (at - base).astype(np.float32)
    weights = np.stack([_far(t + 1), _near(t), _near(1 - t), _far(2 - t)]).astype(np.float32)
    return [np.clip(base + k, 0, in_size - 1) for k in (-1, 0, 1, 2)], weights


def _near(x: Floats) -> Floats:
    return np.asarray(((_A + 2) * x - (_A + 3)) * x * x + 1, np.float32)


def _far(x: Floats) -> Floats:
    return np.asarray(((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A, np.float32)


def _fused(values: list[Floats], weights: Floats) -> Floats:
    """The weighted sum, started from the second value."""
    total: Floats = values[1] * weights[1]
    for k in (0, 2, 3):
        exact = values[k].astype(np.float64) * weights[k]
        total = (exact + total).astype(np.float32)
    return total
