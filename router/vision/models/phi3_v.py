"""Phi-3.5-vision: crops of a canvas padded with white, and a float global view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from router.vision.backend.base import Backend
from router.vision.files import ModelFiles
from router.vision.geometry import Addressing, Draw, Layout, Rule, Tiles, whole
from router.vision.interpolate import bicubic
from router.vision.models.image_only import ImageSpec, too_extreme
from router.vision.plan import Claim, ItemPlan, Modality, PixelFormat, TensorNames
from router.vision.settings import Reader, model_token
from router.vision.values import fill_value, round_to_bfloat16

_WHITE = 255


@dataclass(frozen=True, slots=True)
class Transposed:
    """A layout seen with its rows and columns exchanged."""

    inner: Layout

    @property
    def height(self) -> int:
        return self.inner.width

    @property
    def width(self) -> int:
        return self.inner.height

    def addressing(self) -> Addressing:
        upright = self.inner.addressing()
        return Addressing(upright.columns, upright.rows, 1, upright.channel_stride, 1, 0)


class Phi3V(ImageSpec):
    """Phi-3-vision and Phi-3.5-vision checkpoints.

    Their processor is code of the checkpoint itself and resizes with Pillow, so
    the result depends on the worker's Pillow version: `rule`.
    """

    family = "phi3_v"

    def __init__(self, files: ModelFiles, rule: Rule = "pillow13") -> None:
        super().__init__(model_token({}, files.token_ids, "", "<|image|>"), "<|image|>")
        read = Reader(files.preprocessor_config, files.image_file)
        self._most_crops = read.positive("num_crops")
        self._tile_tokens = read.positive("num_img_tokens", 144)
        self.normalization = read.normalization("to_tensor")
        self.warnings = read.warnings()
        self._rows = isqrt(self._tile_tokens)
        self._side = 336
        self._rule: Rule = rule

    def _plan(self, index: int, source: tuple[int, int], size: tuple[int, int]) -> ItemPlan:
        portrait = size[0] < size[1]
        # A portrait is worked on lying on its side, and stood up at the end.
        long, short = (size[1], size[0]) if portrait else size
        ratio = long / short
        scale = 1
        while scale * ceil(scale / ratio) <= self._most_crops:
            scale += 1
        new_long = (scale - 1) * self._side
        new_short = int(new_long / ratio)
        if new_short < 1 or new_long < 1:
            raise too_extreme(index, source, self.family)
        padded = ceil(new_short / self._side) * self._side
        height, width = (new_long, padded) if portrait else (padded, new_long)
        tiles = Tiles(height // self._side, width // self._side, self._side, self._side)
        draw = Draw(
            crop=whole(source[1], source[0]) if portrait else whole(*source),
            height=new_short,
            width=new_long,
            window=whole(new_long, new_short),
            filter="bilinear",
            rule=self._rule,
            layout=Transposed(tiles) if portrait else tiles,
            top=(padded - new_short) // 2,
            start=3 * self._side * self._side,
        )
        tokens = self._tokens(tiles.rows, tiles.columns)
        return ItemPlan(
            modality="image",
            index=index,
            source_width=source[0],
            source_height=source[1],
            width=width,
            height=height,
            grid=(tiles.rows, tiles.columns),
            draws=(draw,),
            output_shape=(1, self._most_crops + 1, 3, self._side, self._side),
            feature_tokens=tokens,
            prompt_tokens=tokens,
        )

    def _tokens(self, rows: int, columns: int) -> int:
        """Tiles and global view, a separator a row of both, and one between them."""
        return (rows * columns + 1) * self._tile_tokens + 1 + (rows + 1) * self._rows

    def pack(
        self,
        plan: ItemPlan,
        pixels: npt.NDArray[np.uint8],
        pixel_format: PixelFormat,
        backend: Backend,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        if not pixel_format.normalized:
            raise ValueError(f"{self.family} pixels are always normalised")
        draw = plan.draws[0]
        if isinstance(draw.layout, Transposed):
            pixels = np.ascontiguousarray(pixels.transpose(1, 0, 2))
        if out is None:
            out = backend.empty(plan.output_shape, pixel_format.numpy_dtype)
        flat = out.reshape(-1)
        tile, tiles = 3 * self._side * self._side, plan.grid[0] * plan.grid[1]
        used = flat[tile : tile * (1 + tiles)]
        fill_value(used, (self._side, self._side), self.table(pixel_format), _WHITE)
        backend.draw(pixels, draw, self.table(pixel_format), flat)
        flat[tile * (1 + tiles) :] = 0
        flat[:tile] = self._global_view(plan, pixels, pixel_format, backend).reshape(-1)
        return out

    def _global_view(
        self,
        plan: ItemPlan,
        pixels: npt.NDArray[np.uint8],
        pixel_format: PixelFormat,
        backend: Backend,
    ) -> npt.NDArray[Any]:
        """The padded canvas at one tile's size, interpolated on normalised float32 values."""
        draw, table = plan.draws[0], self.table(PixelFormat("float32", normalized=True))
        upright = Tiles(1, 1, plan.height, plan.width)
        layout = Transposed(upright) if isinstance(draw.layout, Transposed) else upright
        canvas = backend.empty((3, plan.height, plan.width), np.dtype(np.float32))
        flat = canvas.reshape(-1)
        fill_value(flat, canvas.shape, table, _WHITE)
        backend.draw(pixels, replace(draw, layout=layout, start=0), table, flat)
        view = bicubic(canvas, self._side, self._side)
        if pixel_format.dtype == "bfloat16":
            return round_to_bfloat16(view)
        return view.astype(pixel_format.numpy_dtype)

    def tensor_names(self, modality: Modality) -> TensorNames:
        return TensorNames(
            (self._most_crops + 1, 3, self._side, self._side),
            batched=("pixel_values", "image_sizes"),
            keep_on_cpu=("image_sizes",),
        )

    def side_tensors(self, plans: Sequence[ItemPlan]) -> dict[str, npt.NDArray[Any]]:
        return {"image_sizes": np.array([(p.height, p.width) for p in plans], np.int64)}

    def side_shapes(self, modality: Modality) -> Mapping[str, tuple[int, ...]]:
        return {"image_sizes": (2,)}

    def claim(
        self, modality: Modality, side: Mapping[str, Sequence[int]], pixels: tuple[int, ...]
    ) -> Claim:
        height, width = side["image_sizes"]
        rows, columns = height // self._side, width // self._side
        whole_tiles = min(rows, columns) > 0 and not (height % self._side or width % self._side)
        if not whole_tiles or rows * columns > self._most_crops:
            raise ValueError("its size is not that of a canvas of the model's")
        return Claim(1, self._tokens(rows, columns))
