"""Llama 4: tiles of the canvas that fits best, and the whole picture as a last tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor
from typing import Any

import numpy as np
import numpy.typing as npt

from router.vision.files import ModelFiles
from router.vision.geometry import Draw, Tiles, whole
from router.vision.models.image_only import (
    ImageSpec,
    config_value,
    encoder_patch,
    one_tile,
    squash,
)
from router.vision.plan import Claim, ItemPlan, Modality, Replacement, TensorNames
from router.vision.settings import Reader, model_token


class Llama4(ImageSpec):
    """Llama 4 checkpoints. A vLLM worker expands their anchor by itself."""

    family = "llama4"
    worker_expandable: frozenset[Modality] = frozenset({"image"})

    def __init__(self, files: ModelFiles) -> None:
        config, tokens = files.config, files.token_ids
        self._image = model_token({}, tokens, "", "<|image|>")
        patch = model_token(config, tokens, "image_token_index", "<|patch|>")
        super().__init__(self._image, "<|image|>", placeholder=patch)
        self._start = model_token(config, tokens, "boi_token_index", "<|image_start|>")
        self._end = model_token(config, tokens, "eoi_token_index", "<|image_end|>")
        self._x_separator = model_token({}, tokens, "", "<|tile_x_separator|>")
        self._y_separator = model_token({}, tokens, "", "<|tile_y_separator|>")
        read = Reader(files.preprocessor_config, files.image_file)
        self._side = read.side("size")
        self._most_tiles = read.positive("max_patches", 16)
        self._to_largest = read.switch("resize_to_max_canvas", default=False)
        read.only("do_resize", True)
        read.only("do_center_crop", False)
        read.only("resample", 2)
        self.normalization = read.normalization("bfloat16")
        self.warnings = read.warnings()
        ratio = config_value(config, "vision_config", "pixel_shuffle_ratio")
        patches = self._side // encoder_patch(config, 14)
        self._tile_tokens = round(patches * patches * float(0.5 if ratio is None else ratio) ** 2)
        self._canvases = canvases(self._most_tiles)

    def _plan(self, index: int, source: tuple[int, int], size: tuple[int, int]) -> ItemPlan:
        width, height = size
        side = self._side
        rows, columns = best_canvas(width, height, side, self._canvases, self._to_largest)
        canvas_height, canvas_width = rows * side, columns * side
        most_height, most_width = canvas_height, canvas_width
        if not self._to_largest:
            # A small picture grows to one tile at most.
            most_height = min(max(height, side), canvas_height)
            most_width = min(max(width, side), canvas_width)
        new_height, new_width = fit(width, height, most_width, most_height)
        layout = Tiles(rows, columns, side, side)
        draws = [
            Draw(
                crop=whole(*source),
                height=new_height,
                width=new_width,
                window=whole(new_width, new_height),
                filter="bilinear",
                rule="torch",
                layout=layout,
            )
        ]
        tiles = rows * columns
        if tiles > 1:
            start = tiles * 3 * side * side
            draws.append(squash(source, one_tile(side), "bilinear", start=start))
            tiles += 1
        features = tiles * self._tile_tokens
        # Start, <|image|> and end; between and behind tiles, a separator each.
        others = 3 + (rows * columns if tiles > 1 else 0)
        return ItemPlan(
            modality="image",
            index=index,
            source_width=source[0],
            source_height=source[1],
            width=canvas_width,
            height=canvas_height,
            grid=(rows, columns),
            draws=tuple(draws),
            output_shape=(tiles, 3, side, side),
            feature_tokens=features,
            prompt_tokens=features + others,
            background=0,
        )

    def replacement(self, plan: ItemPlan) -> Replacement:
        rows, columns = plan.grid
        tile = [self.placeholder_ids["image"]] * self._tile_tokens
        ids = [self._start]
        if rows * columns > 1:
            row = [*tile, self._x_separator] * columns
            row[-1] = self._y_separator
            ids += row * rows
        ids += [self._image, *tile, self._end]
        return Replacement(np.array(ids, np.uint32), 0, len(ids))

    def interleaves(self, modality: Modality) -> bool:
        return True

    def tensor_names(self, modality: Modality) -> TensorNames:
        small = ("patches_per_image", "aspect_ratios")
        return TensorNames(
            (3, self._side, self._side),
            flat=(("pixel_values", "patches_per_image"),),
            batched=small,
            keep_on_cpu=small,
        )

    def side_tensors(self, plans: Sequence[ItemPlan]) -> dict[str, npt.NDArray[Any]]:
        return {
            "aspect_ratios": np.array([plan.grid for plan in plans], np.int64),
            "patches_per_image": np.array([plan.output_shape[0] for plan in plans], np.int64),
        }

    def side_shapes(self, modality: Modality) -> Mapping[str, tuple[int, ...]]:
        return {"aspect_ratios": (2,), "patches_per_image": ()}

    def claim(
        self, modality: Modality, side: Mapping[str, Sequence[int]], pixels: tuple[int, ...]
    ) -> Claim:
        rows, columns = side["aspect_ratios"]
        if (rows, columns) not in self._canvases:
            raise ValueError("its aspect ratio is not one of the model's")
        tiles = rows * columns + (rows * columns > 1)
        if side["patches_per_image"][0] != tiles:
            raise ValueError("the number of tiles is not that of its aspect ratio")
        return Claim(tiles, tiles * self._tile_tokens)


def canvases(most_tiles: int) -> tuple[tuple[int, int], ...]:
    """All (rows, columns) of up to `most_tiles` tiles, in the reference's order.

    Grouped by aspect ratio, each group where its largest member comes first.
    """
    groups: dict[float, list[tuple[int, int]]] = {}
    for tiles in range(most_tiles, 0, -1):
        for rows in range(1, tiles + 1):
            if tiles % rows == 0:
                groups.setdefault(rows / (tiles // rows), []).append((rows, tiles // rows))
    return tuple(canvas for group in groups.values() for canvas in group)


def best_canvas(
    width: int,
    height: int,
    side: int,
    choices: Sequence[tuple[int, int]],
    to_largest: bool,
) -> tuple[int, int]:
    """The (rows, columns) with the smallest upscale, else the smallest downscale.

    Among equals the smallest area. Scales are float32, as ties depend on it.
    Source: transformers `models/llama4/image_processing_llama4.get_best_fit`.
    """
    grid = np.array(choices, np.int64)
    scale_h = (grid[:, 0] * side).astype(np.float32) / np.float32(height)
    scale_w = (grid[:, 1] * side).astype(np.float32) / np.float32(width)
    scales = np.minimum(scale_h, scale_w)
    growing = scales[scales >= 1]
    if not len(growing):
        growing = scales
        to_largest = True
    chosen = growing.max() if to_largest else growing.min()
    equals = grid[scales == chosen]
    rows, columns = equals[np.argmin(equals[:, 0] * equals[:, 1])]
    return int(rows), int(columns)


def fit(width: int, height: int, most_width: int, most_height: int) -> tuple[int, int]:
    """The largest (height, width) of the picture's aspect ratio within bounds, at least 1."""
    scale_w, scale_h = most_width / width, most_height / height
    if scale_w < scale_h:
        new_width, new_height = most_width, min(floor(height * scale_w), most_height)
    else:
        new_width, new_height = min(floor(width * scale_h), most_width), most_height
    return max(new_height, 1), max(new_width, 1)
