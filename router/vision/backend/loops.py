"""The CPU's inner loops: compiled once, run without the GIL.

Pictures are uint8 [h, w, 3], weights as in `resample.Taps`. Sums are int32:
weights of at most 22 bits that add up to about one, times a byte, stay below
2^31.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]


@njit(inline="always")
def level(total: Any, p: int) -> Any:
    """A rounded sum as a byte."""
    return np.uint8(min(max(total >> p, 0), 255))


@njit(nogil=True, cache=True)
def horizontal(
    src: Bytes, top: int, left: int, first: Ints, count: Ints, weights: Ints, p: int, out: Bytes
) -> None:
    """Resize rows of `src` from `top` on along x, into out [rows, n, 3]."""
    half = np.int32(1 << (p - 1))
    for y in range(out.shape[0]):
        row = src[top + y]
        for x in range(out.shape[1]):
            red = green = blue = half
            start = left + first[x]
            for k in range(count[x]):
                weight = weights[x, k]
                red += weight * np.int32(row[start + k, 0])
                green += weight * np.int32(row[start + k, 1])
                blue += weight * np.int32(row[start + k, 2])
            out[y, x, 0] = level(red, p)
            out[y, x, 1] = level(green, p)
            out[y, x, 2] = level(blue, p)


@njit(nogil=True, cache=True)
def vertical(
    src: Bytes, top: int, left: int, first: Ints, count: Ints, weights: Ints, p: int, out: Bytes
) -> None:
    """Resize columns of `src` from `left` on along y, into out [n, columns, 3]."""
    width = out.shape[1] * 3
    sums = np.empty(width, np.int32)
    for y in range(out.shape[0]):
        vertical_line(src, top + first[y], left * 3, count[y], weights[y], p, sums)
        line = out[y].reshape(-1)
        for x in range(width):
            line[x] = level(sums[x], p)


@njit(nogil=True, cache=True, inline="always")
def vertical_line(
    src: Bytes, row: int, skip: int, count: int, weights: Ints, p: int, sums: Ints
) -> None:
    """Weighted sum of `count` rows of `src` from `row` on, into `sums`."""
    for x in range(sums.shape[0]):
        sums[x] = 1 << (p - 1)
    for k in range(count):
        weight = weights[k]
        line = src[row + k].reshape(-1)
        for x in range(sums.shape[0]):
            sums[x] += weight * np.int32(line[skip + x])


@njit(nogil=True, cache=True)
def vertical_scatter(
    src: Bytes,
    top: int,
    left: int,
    first: Ints,
    count: Ints,
    weights: Ints,
    p: int,
    rows: Offsets,
    columns: Offsets,
    edges: Offsets,
    channel_stride: int,
    copies: int,
    copy_stride: int,
    levels: npt.NDArray[Any],
    planar: npt.NDArray[Any],
    planar_units: npt.NDArray[Any],
    out_units: npt.NDArray[Any],
    unit: int,
) -> None:
    """The vertical pass, table lookup and writing, one output row at a time.

    `edges` are the columns where contiguous runs begin, with the width at the
    end. `planar` [3, width] is scratch in the output's dtype, `planar_units` and
    `out_units` views of it and of the output in units of `unit` elements.
    """
    width = planar.shape[1]
    sums = np.empty(width * 3, np.int32)
    for y in range(rows.shape[0]):
        if count[y] == 1:
            line = src[top + first[y]].reshape(-1)
            for c in range(3):
                for x in range(width):
                    planar[c, x] = levels[c, line[(left + x) * 3 + c]]
        else:
            vertical_line(src, top + first[y], left * 3, count[y], weights[y], p, sums)
            for c in range(3):
                for x in range(width):
                    planar[c, x] = levels[c, level(sums[3 * x + c], p)]
        for c in range(3):
            base = rows[y] + c * channel_stride
            for _ in range(copies):
                for r in range(edges.shape[0] - 1):
                    x = edges[r]
                    to = (base + columns[x]) // unit
                    for i in range(x // unit, edges[r + 1] // unit):
                        out_units[to] = planar_units[c, i]
                        to += 1
                base += copy_stride
