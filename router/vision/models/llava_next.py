"""LLaVA-NeXT: a base view, then tiles of the best-fitting canvas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from router.vision.files import ModelFiles
from router.vision.geometry import Draw, Tiles, whole
from router.vision.models.image_only import (
    ImageSpec,
    encoder_patch,
    one_tile,
    squash,
    view_tokens,
)
from router.vision.plan import Claim, ItemPlan, Modality, TensorNames
from router.vision.settings import Reader, model_token


def best_canvas(width: int, height: int, canvases: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The (height, width) that shows most of a picture, then wastes least.

    Source: transformers `image_processing_utils.select_best_resolution`.
    """
    best, most_shown, least_wasted = canvases[0], 0, float("inf")
    for canvas_height, canvas_width in canvases:
        scale = min(canvas_width / width, canvas_height / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        wasted = canvas_width * canvas_height - shown
        if shown > most_shown or (shown == most_shown and wasted < least_wasted):
            best, most_shown, least_wasted = (canvas_height, canvas_width), shown, wasted
    return best


class LlavaNext(ImageSpec):
    """LLaVA-NeXT (1.6) checkpoints."""

    family = "llava_next"

    def __init__(self, files: ModelFiles) -> None:
        token = model_token(files.config, files.token_ids, "image_token_index", "<image>")
        super().__init__(token, "<image>")
        read = Reader(files.preprocessor_config, files.image_file)
        self._side = read.side("size")
        if read.side("crop_size") != self._side:
            raise ValueError(f"{files.image_file}: size and crop_size differ")
        self._canvases = _pinpoints(
            read.get("image_grid_pinpoints"),
            self._side,
            f"{files.image_file}: image_grid_pinpoints",
        )
        read.only("aspect_ratio_setting", "anyres")
        for switch in ("do_resize", "do_center_crop", "do_pad"):
            read.only(switch, True)
        read.only("resample", 3)
        self.normalization = read.normalization()
        self.warnings = read.warnings()
        self._patches = self._side // encoder_patch(files.config, 14)
        self._base_tokens = view_tokens(files.config, self._patches)

    def _plan(self, index: int, source: tuple[int, int], size: tuple[int, int]) -> ItemPlan:
        width, height = size
        canvas_height, canvas_width = best_canvas(width, height, self._canvases)
        scale_w, scale_h = canvas_width / width, canvas_height / height
        if scale_w < scale_h:
            new_width, new_height = canvas_width, min(ceil(height * scale_w), canvas_height)
        else:
            new_width, new_height = min(ceil(width * scale_h), canvas_width), canvas_height
        side = self._side
        layout = Tiles(canvas_height // side, canvas_width // side, side, side)
        tiles = Draw(
            crop=whole(*source),
            height=new_height,
            width=new_width,
            window=whole(new_width, new_height),
            filter="bicubic",
            rule="torch",
            layout=layout,
            top=(canvas_height - new_height) // 2,
            left=(canvas_width - new_width) // 2,
            start=3 * side * side,
        )
        views = 1 + layout.rows * layout.columns
        tokens = self._tokens(width, height, layout.rows, layout.columns)
        return ItemPlan(
            modality="image",
            index=index,
            source_width=source[0],
            source_height=source[1],
            width=canvas_width,
            height=canvas_height,
            grid=(height, width),
            draws=(tiles, squash(source, one_tile(side), "bicubic")),
            output_shape=(1, views, 3, side, side),
            feature_tokens=tokens,
            prompt_tokens=tokens,
            background=0,
        )

    def _tokens(self, width: int, height: int, rows: int, columns: int) -> int:
        """The base view, the canvas without its padding, and a newline for each of its rows.

        Source: transformers `LlavaNextProcessor._get_unpadded_features`.
        """
        across, down = self._patches * columns, self._patches * rows
        if width / height > across / down:
            shown = int(round(height * (across / width), 7))
            down -= (down - shown) // 2 * 2
        else:
            shown = int(round(width * (down / height), 7))
            across -= (across - shown) // 2 * 2
        return self._base_tokens + across * down + down

    def tensor_names(self, modality: Modality) -> TensorNames:
        return TensorNames(
            (0, 3, self._side, self._side),
            batched=("pixel_values", "image_sizes"),
            keep_on_cpu=("image_sizes",),
        )

    def side_tensors(self, plans: Sequence[ItemPlan]) -> dict[str, npt.NDArray[Any]]:
        return {"image_sizes": np.array([plan.grid for plan in plans], np.int64)}

    def side_shapes(self, modality: Modality) -> Mapping[str, tuple[int, ...]]:
        return {"image_sizes": (2,)}

    def claim(
        self, modality: Modality, side: Mapping[str, Sequence[int]], pixels: tuple[int, ...]
    ) -> Claim:
        height, width = side["image_sizes"]
        if not (0 < height < 1 << 20 and 0 < width < 1 << 20):
            raise ValueError("its size is not that of a picture")
        canvas_height, canvas_width = best_canvas(width, height, self._canvases)
        rows, columns = canvas_height // self._side, canvas_width // self._side
        if pixels[1] < 1 + rows * columns:
            raise ValueError("there are fewer tiles than its size needs")
        return Claim(1, self._tokens(width, height, rows, columns))


def _pinpoints(value: object, side: int, where: str) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} is missing")
    canvases = []
    for pair in value:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"{where} are not pairs")
        if any(not isinstance(n, int) or n <= 0 or n % side for n in pair):
            raise ValueError(f"{where} are not multiples of {side}")
        canvases.append((pair[0], pair[1]))
    return tuple(canvases)
