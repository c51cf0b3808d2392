"""The CPU backend: numba loops over pooled buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from router.vision.backend import loops
from router.vision.backend.buffers import BufferPool
from router.vision.geometry import Addressing, Box, Draw, Tiles, whole
from router.vision.resample import Taps, taps, vertical_first
from router.vision.values import Table

_U8 = np.dtype(np.uint8)


class CpuBackend:
    """Exact resizing on the calling thread; any number of threads may call at once."""

    name = "cpu"

    def __init__(self, pool_bytes: int = 1 << 30) -> None:
        self._pool = BufferPool(pool_bytes)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        return self._pool.empty(shape, dtype)

    def draw(
        self, pixels: npt.NDArray[np.uint8], draw: Draw, table: Table, out: npt.NDArray[Any]
    ) -> None:
        crop, window = draw.crop, draw.window
        across = taps(crop.width, draw.width, draw.filter, draw.rule).window(
            window.left, window.width
        )
        down = taps(crop.height, draw.height, draw.filter, draw.rule).window(
            window.top, window.height
        )
        keeps_width, keeps_height = crop.width == draw.width, crop.height == draw.height
        if keeps_width:
            # The vertical pass reads the window straight out of the source.
            at = Box(crop.left + window.left, crop.top, window.width, crop.height)
            self._finish(pixels, at, None if keeps_height else down, draw, table, out)
        elif not keeps_height and vertical_first(
            draw.rule, crop.height, crop.width, draw.height, draw.width
        ):
            between = self.empty((window.height, crop.width, 3), _U8)
            loops.vertical(pixels, crop.top, crop.left, *_arrays(down), between)
            done = self.empty((window.height, window.width, 3), _U8)
            loops.horizontal(between, 0, 0, *_arrays(across), done)
            self._finish(done, whole(window.width, window.height), None, draw, table, out)
        else:
            # Only the rows that the vertical pass will read.
            low = int(down.first[0])
            high = int((down.first + down.count).max())
            if keeps_height:
                low, high = window.top, window.top + window.height
            between = self.empty((high - low, window.width, 3), _U8)
            loops.horizontal(pixels, crop.top + low, crop.left, *_arrays(across), between)
            if keeps_height:
                self._finish(between, whole(window.width, high - low), None, draw, table, out)
            else:
                at = Box(0, -low, window.width, high - low)
                self._finish(between, at, down, draw, table, out)

    def _finish(
        self,
        src: npt.NDArray[np.uint8],
        at: Box,
        down: Taps | None,
        draw: Draw,
        table: Table,
        out: npt.NDArray[Any],
    ) -> None:
        """Vertical pass (where there is one), table and layout, in one go."""
        height, width = draw.window.height, draw.window.width
        if down is None:
            down = _straight(draw.window.top if at.height != height else 0, height)
        address = draw.layout.addressing()
        rows = address.rows[draw.top : draw.top + height] + draw.start
        columns = address.columns[draw.left : draw.left + width]
        edges = _edges(draw.left, width, address.run)
        # Values are only looked up and moved: their bits will do, whatever they mean.
        bits = np.dtype(f"u{out.dtype.itemsize}")
        dtype, unit = _unit(address, out, draw, rows)
        planar = np.empty((3, width), bits)
        loops.vertical_scatter(
            src,
            at.top,
            at.left,
            *_arrays(down),
            rows,
            columns,
            edges,
            address.channel_stride,
            address.copies,
            address.copy_stride,
            table.levels.view(bits),
            planar,
            planar.view(dtype),
            out.view(dtype),
            unit,
        )

    def warm_up(self) -> None:
        """Compile (or load from the cache) every loop for every dtype that is used."""
        picture = np.zeros((48, 48, 3), np.uint8)
        for name in ("uint8", "uint16", "float32"):
            levels = Table(np.zeros((3, 256), np.dtype(name)), name == "uint8")
            for side, run in ((32, 32), (28, 14), (15, 15)):
                layout = Tiles(1, side // run, side, run)
                out = np.empty(side * side * 3, np.dtype(name))
                draw = Draw(
                    whole(48, 48), side, side, whole(side, side), "bicubic", "torch", layout
                )
                self.draw(picture, draw, levels, out)
        tall = np.zeros((300, 2, 3), np.uint8)
        draw = Draw(whole(2, 300), 4, 4, whole(4, 4), "bicubic", "pillow12", Tiles(1, 1, 4, 4))
        self.draw(tall, draw, Table(np.zeros((3, 256), _U8), True), np.empty(48, np.uint8))


def _arrays(axis: Taps) -> tuple[Any, Any, Any, int]:
    return axis.first, axis.count, axis.weights, axis.precision


def _straight(start: int, height: int) -> Taps:
    """Taps that copy rows."""
    return Taps(
        np.arange(start, start + height, dtype=np.int32),
        np.ones(height, np.int32),
        np.ones((height, 1), np.int32),
        1,
    )


def _edges(left: int, width: int, run: int) -> npt.NDArray[np.int64]:
    """Where contiguous runs begin within `width` columns from `left` on, and the end."""
    inner = np.arange(run - left % run, width, run, dtype=np.int64)
    return np.concatenate([[0], inner, [width]]).astype(np.int64)


def _unit(
    address: Addressing, out: npt.NDArray[Any], draw: Draw, rows: npt.NDArray[np.int64]
) -> tuple[np.dtype[Any], int]:
    """The widest integer that runs and their addresses are whole multiples of."""
    item = out.dtype.itemsize
    sizes = (
        address.run,
        draw.left,
        draw.window.width,
        draw.start,
        address.channel_stride,
        address.copy_stride,
        out.size,
    )
    step = int(np.gcd.reduce(np.array([*sizes, *rows[:2]], dtype=np.int64)))
    for name in ("uint64", "uint32", "uint16", "uint8"):
        size = np.dtype(name).itemsize
        if size >= item and (step * item) % size == 0:
            return np.dtype(name), size // item
    return np.dtype(f"uint{8 * item}"), 1
