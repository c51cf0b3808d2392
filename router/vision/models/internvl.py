"""InternVL (in transformers' form): tiles of the closest aspect ratio, and a thumbnail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from router.vision.files import ModelFiles
from router.vision.geometry import Tiles
from router.vision.models.image_only import (
    ImageSpec,
    config_value,
    encoder_patch,
    one_tile,
    squash,
)
from router.vision.plan import Claim, ItemPlan, Modality, Replacement, TensorNames
from router.vision.settings import Reader, model_token


def best_grid(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """The (columns, rows) of the closest aspect ratio; of equals the larger while it is filled.

    Source: transformers `got_ocr2` `get_optimal_tiled_canvas`.
    """
    grids = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= columns * rows <= most
    ]
    best, difference = (1, 1), float("inf")
    for columns, rows in sorted(grids, key=lambda g: g[0] * g[1]):
        off = abs(width / height - columns / rows)
        if off < difference:
            best, difference = (columns, rows), off
        elif off == difference and width * height > 0.5 * side * side * columns * rows:
            best = (columns, rows)
    return best


class InternVL(ImageSpec):
    """InternVL checkpoints with the GotOcr2 processor."""

    family = "internvl"

    def __init__(self, files: ModelFiles) -> None:
        config, tokens = files.config, files.token_ids
        token = model_token(config, tokens, "image_token_id", "<IMG_CONTEXT>")
        super().__init__(token, "<IMG_CONTEXT>")
        self._token = token
        self._start = model_token({}, tokens, "", "<img>")
        self._end = model_token({}, tokens, "", "</img>")
        read = Reader(files.preprocessor_config, files.image_file)
        self._side = read.side("size")
        # The model's own processor switches tiling on whatever the file says.
        read.get("crop_to_patches")
        self._least = read.positive("min_patches", 1)
        self._most = read.positive("max_patches", 12)
        read.only("do_resize", True)
        read.only("do_center_crop", False)
        read.only("resample", 3)
        self.normalization = read.normalization()
        self.warnings = read.warnings()
        ratio = config_value(config, "downsample_ratio")
        patches = self._side // encoder_patch(config, 14)
        computed = round((patches * float(0.5 if ratio is None else ratio)) ** 2)
        stated = config_value(config, "image_seq_length")
        if stated is not None and stated != computed:
            raise ValueError("config.json: image_seq_length is not that of size and patch_size")
        self._tile_tokens = computed

    def _plan(self, index: int, source: tuple[int, int], size: tuple[int, int]) -> ItemPlan:
        side = self._side
        columns, rows = best_grid(*size, side, self._least, self._most)
        layout = Tiles(rows, columns, side, side)
        draws = [squash(source, layout, "bicubic")]
        tiles = rows * columns
        if tiles > 1:
            start = tiles * 3 * side * side
            draws.append(squash(source, one_tile(side), "bicubic", start=start))
            tiles += 1
        features = tiles * self._tile_tokens
        return ItemPlan(
            modality="image",
            index=index,
            source_width=source[0],
            source_height=source[1],
            width=layout.width,
            height=layout.height,
            grid=(rows, columns),
            draws=tuple(draws),
            output_shape=(tiles, 3, side, side),
            feature_tokens=features,
            prompt_tokens=features + 2,
        )

    def replacement(self, plan: ItemPlan) -> Replacement:
        ids = np.full(plan.prompt_tokens, self._token, np.uint32)
        ids[0], ids[-1] = self._start, self._end
        return Replacement(ids, 1, plan.feature_tokens)

    def tensor_names(self, modality: Modality) -> TensorNames:
        return TensorNames(
            (3, self._side, self._side),
            flat=(("pixel_values", "image_num_patches"),),
            batched=("image_num_patches",),
            keep_on_cpu=("image_num_patches", "image_token_id"),
        )

    def side_tensors(self, plans: Sequence[ItemPlan]) -> dict[str, npt.NDArray[Any]]:
        return {
            "image_num_patches": np.array([plan.output_shape[0] for plan in plans], np.int64),
            "image_token_id": np.array(self._token, np.int64),
        }

    def side_shapes(self, modality: Modality) -> Mapping[str, tuple[int, ...]]:
        return {"image_num_patches": ()}

    def shared_tensors(self, modality: Modality) -> frozenset[str]:
        return frozenset({"image_token_id"})

    def claim(
        self, modality: Modality, side: Mapping[str, Sequence[int]], pixels: tuple[int, ...]
    ) -> Claim:
        tiles = side["image_num_patches"][0]
        # A thumbnail comes with two tiles or more, so two in all cannot be.
        if not 1 <= tiles <= self._most + 1 or tiles == 2:
            raise ValueError("the number of its tiles is not one of the model's")
        return Claim(tiles, tiles * self._tile_tokens)
