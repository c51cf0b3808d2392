"""Where pixels come from and where they go, in integers.

Every family's output, however it is cut up, has one property in common: the
address of a pixel is `rows[y] + columns[x] + channel * channel_stride`. So a
layout is two offset tables and a stride, and one kernel writes them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Filter = Literal["bilinear", "bicubic", "lanczos"]
Rule = Literal["torch", "pillow12", "pillow13"]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Addressing:
    """A layout worked out: int64 element offsets.

    The value of channel c at (y, x) goes to `rows[y] + columns[x] +
    c * channel_stride`, and again `copy_stride` further on for each further
    copy. Columns come in contiguous runs of `run` elements.
    """

    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    run: int
    channel_stride: int
    copies: int
    copy_stride: int


class Layout(Protocol):
    """A canvas of `height` x `width` pixels laid out in memory somehow."""

    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    def addressing(self) -> Addressing: ...


@dataclass(frozen=True, slots=True)
class Tiles:
    """`rows` x `columns` tiles one after the other, each [3, side_y, side_x].

    One tile is the plain channels-first picture.
    """

    rows: int
    columns: int
    tile_height: int
    tile_width: int

    @property
    def height(self) -> int:
        return self.rows * self.tile_height

    @property
    def width(self) -> int:
        return self.columns * self.tile_width

    def addressing(self) -> Addressing:
        return _address_tiles(self)


@dataclass(frozen=True, slots=True)
class Patches:
    """Qwen's patch order for one temporal patch.

    [grid_h/merge][grid_w/merge][merge][merge][3][copies or T][patch][patch]:
    the `merge` x `merge` patches that become one token stand together.
    `temporal` is the number of frames in a patch; `copies` of them are written
    from one picture (a still image fills them all).
    """

    grid_height: int
    grid_width: int
    patch: int
    merge: int
    temporal: int
    copies: int

    @property
    def height(self) -> int:
        return self.grid_height * self.patch

    @property
    def width(self) -> int:
        return self.grid_width * self.patch

    def addressing(self) -> Addressing:
        return _address_patches(self)


@dataclass(frozen=True, slots=True)
class Draw:
    """One resize and where it lands.

    `crop` of the source is resized to `height` x `width`; `window` of that is
    kept and written with its corner at (`top`, `left`) of `layout`'s canvas,
    which itself begins `start` elements into the item's output.
    """

    crop: Box
    height: int
    width: int
    window: Box
    filter: Filter
    rule: Rule
    layout: Layout
    top: int = 0
    left: int = 0
    start: int = 0


def whole(width: int, height: int) -> Box:
    return Box(0, 0, width, height)


@lru_cache(maxsize=64)
def _address_tiles(layout: Tiles) -> Addressing:
    area = layout.tile_height * layout.tile_width
    y = np.arange(layout.height, dtype=np.int64)
    x = np.arange(layout.width, dtype=np.int64)
    rows = (y // layout.tile_height) * (layout.columns * 3 * area)
    rows += (y % layout.tile_height) * layout.tile_width
    columns = (x // layout.tile_width) * (3 * area) + x % layout.tile_width
    return Addressing(rows, columns, layout.tile_width, area, 1, 0)


@lru_cache(maxsize=64)
def _address_patches(layout: Patches) -> Addressing:
    patch, merge = layout.patch, layout.merge
    area = patch * patch
    values = 3 * layout.temporal * area
    y = np.arange(layout.height, dtype=np.int64)
    x = np.arange(layout.width, dtype=np.int64)
    patch_row, patch_column = y // patch, x // patch
    rows = (patch_row // merge) * (layout.grid_width * merge * values)
    rows += (patch_row % merge) * (merge * values) + (y % patch) * patch
    columns = (patch_column // merge) * (merge * merge * values)
    columns += (patch_column % merge) * values + x % patch
    return Addressing(rows, columns, patch, layout.temporal * area, layout.copies, area)
