"""The CPU backend: numba loops over pooled buffers."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from router.buffers import SHARED, BufferPool
from router.vision.backend import loops
from router.vision.backend.runs import runs_of
from router.vision.geometry import Draw, Tiles, whole
from router.vision.resample import Taps, taps, vertical_first
from router.vision.values import Table

_U8 = np.dtype(np.uint8)
_STRIP = 96  # rows; a strip of a wide picture stays in the second-level cache


class CpuBackend:
    """Exact resizing on the calling thread; any number of threads may call at once."""

    name = "cpu"

    def __init__(self, pool: BufferPool = SHARED) -> None:
        self._pool = pool

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        return self._pool.empty(shape, dtype)

    def draw(
        self, pixels: npt.NDArray[np.uint8], draw: Draw, table: Table, out: npt.NDArray[Any]
    ) -> None:
        crop, window = draw.crop, draw.window
        source = pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
        across = taps(crop.width, draw.width, draw.filter, draw.rule).window(
            window.left, window.width
        )
        down = taps(crop.height, draw.height, draw.filter, draw.rule).window(
            window.top, window.height
        )
        keeps_width, keeps_height = crop.width == draw.width, crop.height == draw.height
        if keeps_width:
            # A pass that changes nothing is left out, as the references do.
            source = source[:, window.left : window.left + window.width]
        if keeps_height:
            source = source[window.top : window.top + window.height]
        if keeps_width or keeps_height:
            if not keeps_width:
                source = self._across(source, across)
            self._finish(source, None if keeps_height else down, draw, table, out)
        elif vertical_first(draw.rule, crop.height, crop.width, draw.height, draw.width):
            between = self.empty((window.height, crop.width, 3), _U8)
            loops.resize_lines(*_inputs(source, down, _rows(between)))
            self._finish(self._across(between, across), None, draw, table, out)
        else:
            # Only the rows that the vertical pass will read.
            low, high = int(down.first[0]), int((down.first + down.count).max())
            between = self._across(source[low:high], across)
            self._finish(between, down.shifted(-low), draw, table, out)

    def _across(self, source: npt.NDArray[np.uint8], across: Taps) -> npt.NDArray[np.uint8]:
        """The horizontal pass, as a vertical one over strips laid on their side.

        Turning a strip is cheap while it fits the cache, and along its lines
        the loop runs at the speed of the vertical pass.
        """
        height, width = source.shape[:2]
        out = self.empty((height, len(across.first), 3), _U8)
        for top in range(0, height, _STRIP):
            strip = source[top : top + _STRIP]
            turned = self.empty((width, len(strip), 3), _U8)
            cv2.transpose(strip, turned)
            resized = self.empty((len(across.first), len(strip), 3), _U8)
            loops.resize_lines(*_inputs(turned, across, _rows(resized)))
            cv2.transpose(resized, out[top : top + _STRIP])
        return out

    def _finish(
        self,
        source: npt.NDArray[np.uint8],
        down: Taps | None,
        draw: Draw,
        table: Table,
        out: npt.NDArray[Any],
    ) -> None:
        """Vertical pass (where there is one), table and layout, in one go."""
        # Values are only looked up and moved: their bits will do, whatever they mean.
        bits = np.dtype(f"u{out.dtype.itemsize}")
        runs = runs_of(draw, bits.itemsize, out.size)
        planes = np.empty((3, draw.window.width), bits)
        loops.resize_and_place(
            *_inputs(
                source,
                down or _straight(draw.window.height),
                table.levels.view(bits),
                table.identity,
                planes,
                planes.view(runs.word),
                out.view(runs.word),
                runs.rows,
                runs.starts,
                runs.targets,
                runs.words,
                runs.ends,
                runs.channel_stride,
                runs.second,
            )
        )

    def warm_up(self) -> None:
        """Compile every loop, or load it from the cache, for all that a draw can need.

        A loop is compiled anew for each size of value and of word; these sides
        lead to all of them.
        """
        picture = np.zeros((12, 12, 3), np.uint8)
        for bits in ("u1", "u2", "u4"):
            table = Table(np.zeros((3, 256), np.dtype(bits)), identity=bits == "u1")
            for side in (8, 4, 2, 3):
                layout = Tiles(1, 1, side, side)
                window = whole(side, side)
                draw = Draw(whole(12, 12), side, side, window, "bicubic", "torch", layout)
                self.draw(picture, draw, table, np.empty(3 * side * side, np.dtype(bits)))


def _inputs(picture: npt.NDArray[np.uint8], axis: Taps, *rest: object) -> tuple[Any, ...]:
    """A loop's arguments: the lines, their weights, and what is its own."""
    return (*_lines(picture), axis.first, axis.count, axis.weights, axis.precision, *rest)


def _lines(picture: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], int, int]:
    """A picture [h, w, 3] as (flat bytes, where line 0 starts, distance of lines).

    A window of a larger picture is not copied, so long as its pixels are packed.
    A read-only one is, as the loops would be compiled anew for it.
    """
    base = picture
    while isinstance(base.base, np.ndarray):
        base = base.base
    packed = picture.strides[1:] == (3, 1) and picture.strides[0] > 0
    plain = base.dtype == np.uint8 and base.flags.c_contiguous and base.flags.writeable
    if not packed or not plain:
        base = picture = np.array(picture, order="C")
    origin = picture.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return base.reshape(-1), origin, picture.strides[0]


def _rows(picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return picture.reshape(len(picture), -1)


def _straight(height: int) -> Taps:
    """Taps that copy rows."""
    return Taps(
        np.arange(height, dtype=np.int32),
        np.ones(height, np.int32),
        np.ones((height, 1), np.int32),
        1,
    )
