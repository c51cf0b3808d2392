"""The CUDA kernels: the integer arithmetic of `loops`, one thread an output value.

They are what numba-cuda compiles for a device and what its simulator runs on a
CPU, and give the same bits as the CPU's loops.
"""

from __future__ import annotations

from typing import Any

import numba.cuda

# numba's stubs lack what its CUDA target and its simulator both have.
cuda: Any = numba.cuda


@cuda.jit
def across(src: Any, left: int, first: Any, count: Any, weights: Any, p: int, out: Any) -> None:
    """Horizontal pass: `src` [h, w, 3] from column `left` on, to out [h, n, 3]."""
    x, y = cuda.grid(2)
    if y < out.shape[0] and x < out.shape[1]:
        for c in range(3):
            total = 1 << (p - 1)
            for k in range(count[x]):
                total += weights[x, k] * src[y, left + first[x] + k, c]
            total >>= p
            out[y, x, c] = min(max(total, 0), 255)


@cuda.jit
def down(src: Any, top: int, first: Any, count: Any, weights: Any, p: int, out: Any) -> None:
    """Vertical pass: `src` [h, w, 3] from row `top` on, to out [n, w, 3]."""
    x, y = cuda.grid(2)
    if y < out.shape[0] and x < out.shape[1]:
        for c in range(3):
            total = 1 << (p - 1)
            for k in range(count[y]):
                total += weights[y, k] * src[top + first[y] + k, x, c]
            total >>= p
            out[y, x, c] = min(max(total, 0), 255)


@cuda.jit
def scatter(
    src: Any,
    top: int,
    left: int,
    levels: Any,
    rows: Any,
    columns: Any,
    channel_stride: int,
    copies: int,
    copy_stride: int,
    out: Any,
) -> None:
    """Look up a window of `src` and write it by row and column offsets."""
    x, y = cuda.grid(2)
    if y < rows.shape[0] and x < columns.shape[0]:
        for c in range(3):
            value = levels[c, src[top + y, left + x, c]]
            at = rows[y] + columns[x] + c * channel_stride
            for copy in range(copies):
                out[at + copy * copy_stride] = value
