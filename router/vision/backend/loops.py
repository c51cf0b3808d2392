"""The CPU's inner loops: compiled once, run without the GIL.

Each is written so that its innermost loop walks contiguous memory from zero,
which is what the compiler turns into vector code. Weights are as in
`resample.Taps`. Sums are int32: weights of at most 22 bits that add up to about
one, times a byte, stay below 2^31.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]
Bits = npt.NDArray[Any]


@njit(inline="always")
def level(total: Any, p: int) -> Any:
    """A rounded sum as a byte."""
    return np.uint8(min(max(total >> p, 0), 255))


@njit(inline="always")
def line_of(flat: Any, origin: int, pitch: int, number: int, size: int) -> Any:
    """Line `number`, contiguous, of a picture inside `flat`."""
    start = origin + number * pitch
    return flat[start : start + size]


@njit(nogil=True, cache=True)
def weigh(
    flat: Bytes,
    origin: int,
    pitch: int,
    start: int,
    count: int,
    weights: Ints,
    p: int,
    sums: Ints,
    out: Bytes,
) -> None:
    """out = the weighted sum of `count` lines from `start` on, rounded to bytes."""
    size = out.shape[0]
    half = np.int32(1 << (p - 1))
    for k in range(0, count - 3, 4):
        a = line_of(flat, origin, pitch, start + k, size)
        b = line_of(flat, origin, pitch, start + k + 1, size)
        c = line_of(flat, origin, pitch, start + k + 2, size)
        d = line_of(flat, origin, pitch, start + k + 3, size)
        v, w, x, y = weights[k], weights[k + 1], weights[k + 2], weights[k + 3]
        if count == 4:
            # The commonest case by far, a cubic that hardly shrinks: no sums kept.
            for i in range(size):
                low = v * np.int32(a[i]) + w * np.int32(b[i])
                high = x * np.int32(c[i]) + y * np.int32(d[i])
                out[i] = level(half + low + high, p)
            return
        if k == 0:
            for i in range(size):
                low = v * np.int32(a[i]) + w * np.int32(b[i])
                sums[i] = half + low + x * np.int32(c[i]) + y * np.int32(d[i])
        else:
            for i in range(size):
                low = v * np.int32(a[i]) + w * np.int32(b[i])
                sums[i] += low + x * np.int32(c[i]) + y * np.int32(d[i])
    if count < 4:
        for i in range(size):
            sums[i] = half
    for k in range(count & ~3, count):
        only, v = line_of(flat, origin, pitch, start + k, size), weights[k]
        for i in range(size):
            sums[i] += v * np.int32(only[i])
    for i in range(size):
        out[i] = level(sums[i], p)


@njit(nogil=True, cache=True)
def resize_lines(
    flat: Bytes,
    origin: int,
    pitch: int,
    first: Ints,
    count: Ints,
    weights: Ints,
    p: int,
    out: Bytes,
) -> None:
    """Resize across lines: those at `origin`, `pitch` apart in `flat`, to out [n, size]."""
    sums = np.empty(out.shape[1], np.int32)
    for y in range(out.shape[0]):
        weigh(flat, origin, pitch, first[y], count[y], weights[y], p, sums, out[y])


@njit(inline="always")
def move_runs(
    source: Any, out: Any, base: Any, starts: Any, targets: Any, words: Any, second: Any
) -> None:
    """Write each run of `words` words once, and again `second` words further on."""
    for r in range(targets.shape[0]):
        at = starts[r]
        to = base + targets[r]
        for i in range(words):
            value = source[at + np.uint64(i)]
            out[to + np.uint64(i)] = value
            out[to + second + np.uint64(i)] = value


@njit(nogil=True, cache=True)
def place(
    source: Bits,
    out: Bits,
    base: int,
    starts: npt.NDArray[np.uint64],
    targets: npt.NDArray[np.uint64],
    words: int,
    second: int,
) -> None:
    """`move_runs` with its inner loop unrolled for the usual lengths.

    A 16-pixel patch is a run of 2 words in bytes, 4 in bfloat16 and 8 in
    float32; a 14-pixel patch is always one of 7.
    """
    origin, further = np.uint64(base), np.uint64(second)
    if words == 2:
        move_runs(source, out, origin, starts, targets, 2, further)
    elif words == 4:
        move_runs(source, out, origin, starts, targets, 4, further)
    elif words == 7:
        move_runs(source, out, origin, starts, targets, 7, further)
    elif words == 8:
        move_runs(source, out, origin, starts, targets, 8, further)
    else:
        move_runs(source, out, origin, starts, targets, words, further)


@njit(nogil=True, cache=True)
def resize_and_place(
    flat: Bytes,
    origin: int,
    pitch: int,
    first: Ints,
    count: Ints,
    weights: Ints,
    p: int,
    levels: Bits,
    identity: bool,
    planes: Bits,
    plane_words: Bits,
    out_words: Bits,
    rows: Offsets,
    starts: npt.NDArray[np.uint64],
    targets: npt.NDArray[np.uint64],
    words: int,
    ends: Offsets,
    channel_stride: int,
    second: int,
) -> None:
    """Resize across lines, look up and write, one output row at a time.

    Lines are `width` * 3 bytes of interleaved pixels. `planes` [3, width] is
    scratch of one row's output values. Everything about the output is counted
    in words, the widest integers that runs are made of: `plane_words` and
    `out_words` view planes and output as words; row y of channel c begins at
    `rows[y] + c * channel_stride`; its runs of `words` words go from `starts`
    in a plane to `targets` and again `second` further on. `ends` (start, target,
    length) are the shorter runs at the sides.
    """
    width = planes.shape[1]
    line = np.empty(width * 3, np.uint8)
    sums = np.empty(width * 3, np.int32)
    for y in range(rows.shape[0]):
        if count[y] == 1:
            current = line_of(flat, origin, pitch, first[y], width * 3)
        else:
            weigh(flat, origin, pitch, first[y], count[y], weights[y], p, sums, line)
            current = line
        if identity:
            red, green, blue = planes[0], planes[1], planes[2]
            for x in range(width):
                red[x] = current[3 * x]
                green[x] = current[3 * x + 1]
                blue[x] = current[3 * x + 2]
        else:
            for c in range(3):
                plane, table = planes[c], levels[c]
                for x in range(width):
                    plane[x] = table[current[3 * x + c]]
        for c in range(3):
            base = rows[y] + c * channel_stride
            place(plane_words[c], out_words, base, starts, targets, words, second)
            for e in range(ends.shape[0]):
                at, to = ends[e, 0], base + ends[e, 1]
                for i in range(ends[e, 2]):
                    out_words[to + i] = plane_words[c, at + i]
                    out_words[to + second + i] = plane_words[c, at + i]
