"""Pixtral (in transformers' form): the picture's own size, a token a patch, a break a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor
from typing import Any

import numpy as np
import numpy.typing as npt

from router.vision.files import ModelFiles
from router.vision.geometry import Tiles
from router.vision.models.image_only import ImageSpec, encoder_patch, squash, too_extreme
from router.vision.plan import Claim, ItemPlan, Modality, Replacement, TensorNames
from router.vision.settings import Reader, model_token


class Pixtral(ImageSpec):
    """Pixtral checkpoints behind a LLaVA head."""

    family = "pixtral"

    def __init__(self, files: ModelFiles) -> None:
        config, tokens = files.config, files.token_ids
        token = model_token(config, tokens, "image_token_index", "[IMG]")
        super().__init__(token, "[IMG]")
        self._break = model_token({}, tokens, "", "[IMG_BREAK]")
        self._end = model_token({}, tokens, "", "[IMG_END]")
        read = Reader(files.preprocessor_config, files.image_file)
        self._longest = read.nested("size").positive("longest_edge")
        self._patch = read.side("patch_size")
        read.only("do_resize", True)
        read.only("do_center_crop", False)
        read.only("do_pad", True)
        read.only("resample", 3)
        self.normalization = read.normalization()
        self.warnings = read.warnings()
        # The model's combined processor and its encoder have a word on patches too.
        combined = Reader(files.processor_config, "processor_config.json")
        combined.only("spatial_merge_size", 1)
        Reader(config, "config.json").only("spatial_merge_size", 1)
        for theirs in (encoder_patch(config, self._patch), combined.get("patch_size")):
            if theirs is not None and theirs != self._patch:
                raise ValueError(f"{files.image_file}: patch_size is not the model's")

    def _plan(self, index: int, source: tuple[int, int], size: tuple[int, int]) -> ItemPlan:
        width, height = size
        ratio = max(height / self._longest, width / self._longest)
        if ratio > 1:
            height, width = floor(height / ratio), floor(width / ratio)
        # (n - 1) // patch + 1, so that a side of nothing is no patch, as in the reference.
        rows, columns = (height - 1) // self._patch + 1, (width - 1) // self._patch + 1
        if min(rows, columns) < 1:
            raise too_extreme(index, source, self.family)
        layout = Tiles(1, 1, rows * self._patch, columns * self._patch)
        return ItemPlan(
            modality="image",
            index=index,
            source_width=source[0],
            source_height=source[1],
            width=layout.width,
            height=layout.height,
            grid=(rows, columns),
            draws=(squash(source, layout, "bicubic"),),
            output_shape=(1, 3, layout.height, layout.width),
            feature_tokens=rows * columns,
            prompt_tokens=rows * (columns + 1),
        )

    def replacement(self, plan: ItemPlan) -> Replacement:
        rows, columns = plan.grid
        ids = np.full((rows, columns + 1), self.placeholder_ids["image"], np.uint32)
        ids[:, -1] = self._break
        ids[-1, -1] = self._end
        return Replacement(ids.reshape(-1), 0, ids.size)

    def interleaves(self, modality: Modality) -> bool:
        return True

    def tensor_names(self, modality: Modality) -> TensorNames:
        return TensorNames(
            (3, 0, 0), batched=("pixel_values", "image_sizes"), keep_on_cpu=("image_sizes",)
        )

    def side_tensors(self, plans: Sequence[ItemPlan]) -> dict[str, npt.NDArray[Any]]:
        return {"image_sizes": np.array([(p.height, p.width) for p in plans], np.int64)}

    def side_shapes(self, modality: Modality) -> Mapping[str, tuple[int, ...]]:
        return {"image_sizes": (2,)}

    def claim(
        self, modality: Modality, side: Mapping[str, Sequence[int]], pixels: tuple[int, ...]
    ) -> Claim:
        height, width = side["image_sizes"]
        rows, columns = height // self._patch, width // self._patch
        if min(rows, columns) < 1 or height % self._patch or width % self._patch:
            raise ValueError(f"its size is not a multiple of {self._patch}")
        if height > pixels[2] or width > pixels[3]:
            raise ValueError("it is larger than the tensor")
        return Claim(1, rows * columns)
