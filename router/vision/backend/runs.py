"""A draw's destination as runs of machine words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from router.vision.geometry import Draw


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Where each row's contiguous runs go, counted in words of dtype `word`.

    Row y of channel c begins at `rows[y] + c * channel_stride` (int64). Its
    whole runs are `words` long, from `starts` in the row to `targets` (uint64);
    `ends` [n, 3] are (start, target, length) of cut-off runs at the sides. Each
    run is written again `second` words further on, 0 where there is one copy.
    """

    word: np.dtype[Any]
    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.uint64]
    targets: npt.NDArray[np.uint64]
    words: int
    ends: npt.NDArray[np.int64]
    channel_stride: int
    second: int


@lru_cache(maxsize=64)
def runs_of(draw: Draw, itemsize: int, size: int) -> Runs:
    """The runs of `draw` into an output of `size` values of `itemsize` bytes.

    The word is the widest integer that every run and address is a multiple of.
    """
    address = draw.layout.addressing()
    if address.copies > 2:
        raise ValueError("a layout has at most two copies")
    width, run = draw.window.width, address.run
    rows = address.rows[draw.top : draw.top + draw.window.height] + draw.start
    edges = np.arange(run - draw.left % run, width, run, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), edges])
    lengths = np.diff(np.concatenate([starts, np.full(1, width, np.int64)]))
    targets = address.columns[draw.left + starts]
    second = address.copy_stride if address.copies == 2 else 0
    # Tile and patch addresses are sums of multiples of these.
    steps = [run, draw.left, width, draw.start, address.channel_stride, second, size]
    step = int(np.gcd.reduce(np.array(steps, np.int64)))
    step = int(np.gcd.reduce(np.concatenate([rows, targets, np.full(1, step, np.int64)])))
    word = next(w for w in (8, 4, 2, 1) if w >= itemsize and step * itemsize % w == 0)
    unit = word // itemsize
    whole = lengths == run
    ends = np.stack([starts, targets, lengths], axis=1)[~whole] // unit
    return Runs(
        word=np.dtype(f"u{word}"),
        rows=rows // unit,
        starts=(starts[whole] // unit).astype(np.uint64),
        targets=(targets[whole] // unit).astype(np.uint64),
        words=run // unit,
        ends=np.ascontiguousarray(ends),
        channel_stride=address.channel_stride // unit,
        second=second // unit,
    )
