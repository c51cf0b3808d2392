"""Gemma 3: the whole picture squashed to a square, and crops of it where switched on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, floor
from typing import Any

import numpy as np
import numpy.typing as npt

from router.vision.files import ModelFiles
from router.vision.geometry import Box, Draw, whole
from router.vision.models.image_only import ImageSpec, one_tile
from router.vision.plan import Claim, ItemPlan, Modality, Replacement, TensorNames
from router.vision.settings import Reader, model_token


class Gemma3(ImageSpec):
    """Gemma 3 checkpoints that see."""

    family = "gemma3"

    def __init__(self, files: ModelFiles) -> None:
        config, tokens = files.config, files.token_ids
        begin = model_token(config, tokens, "boi_token_index", "<start_of_image>")
        soft = model_token(config, tokens, "image_token_index", "<image_soft_token>")
        super().__init__(begin, "<start_of_image>", placeholder=soft)
        self._end = model_token(config, tokens, "eoi_token_index", "<end_of_image>")
        if files.encode is None:
            raise ValueError("tokenizer.json is missing: the text around an image needs it")
        self._encode = files.encode
        self._around = list(self._encode("\n\n"))
        read = Reader(files.preprocessor_config, files.image_file)
        self._side = read.side("size")
        # The combined processor's word counts; the image processor only carries it along.
        carried = read.positive("image_seq_length", 256)
        combined = Reader(files.processor_config, "processor_config.json")
        length = combined.positive("image_seq_length", carried)
        if config.get("mm_tokens_per_image", length) != length:
            raise ValueError("image_seq_length is not config.json's mm_tokens_per_image")
        self._tile_tokens = length
        self._pan_and_scan = read.switch("do_pan_and_scan", default=False)
        self._most_crops = read.positive("pan_and_scan_max_num_crops", 4)
        self._least_side = read.positive("pan_and_scan_min_crop_size", 256)
        self._least_ratio = read.number("pan_and_scan_min_ratio_to_activate", 1.2)
        read.only("do_resize", True)
        read.only("resample", 2)
        self.normalization = read.normalization()
        self.warnings = read.warnings()

    def _plan(self, index: int, source: tuple[int, int], size: tuple[int, int]) -> ItemPlan:
        side = self._side
        boxes = [whole(*source), *(self._crops(*source) if self._pan_and_scan else [])]
        draws = tuple(
            Draw(
                crop=box,
                height=side,
                width=side,
                window=whole(side, side),
                filter="bilinear",
                rule="torch",
                layout=one_tile(side),
                start=number * 3 * side * side,
            )
            for number, box in enumerate(boxes)
        )
        views = len(boxes)
        plan = ItemPlan(
            modality="image",
            index=index,
            source_width=source[0],
            source_height=source[1],
            width=side,
            height=side,
            grid=(views,),
            draws=draws,
            output_shape=(views, 3, side, side),
            feature_tokens=views * self._tile_tokens,
            prompt_tokens=0,
        )
        return replace(plan, prompt_tokens=len(self._text(views)))

    def _crops(self, width: int, height: int) -> list[Box]:
        """Even crops along the longer side; the last ends with the picture.

        Source: transformers `Gemma3ImageProcessor.pan_and_scan_batched`.
        """
        longer, shorter = max(width, height), min(width, height)
        if longer / shorter < self._least_ratio:
            return []
        number = min(floor(longer / self._least_side), floor(longer / shorter + 0.5))
        number = min(self._most_crops, max(2, number))
        step = ceil(longer / number)
        if min(step, shorter) < self._least_side:
            return []
        starts = [step * i for i in range(number) if step * i < longer]
        if width >= height:
            return [Box(at, 0, min(step, width - at), height) for at in starts]
        return [Box(0, at, width, min(step, height - at)) for at in starts]

    def _text(self, views: int) -> list[int]:
        """The tokens of an image with `views` views, as the model's processor words them."""
        soft = [self.placeholder_ids["image"]] * self._tile_tokens
        view = [*self._around, self.anchor_ids["image"], *soft, self._end, *self._around]
        if views == 1:
            return view
        ids = [*self._encode("Here is the original image "), *view]
        ids += self._encode(" and here are some crops to help you see better ")
        for number in range(views - 1):
            ids += [*(self._encode(" ") if number else []), *view]
        return ids

    def replacement(self, plan: ItemPlan) -> Replacement:
        ids = self._text(plan.grid[0])
        return Replacement(np.array(ids, np.uint32), 0, len(ids))

    def interleaves(self, modality: Modality) -> bool:
        return True

    def tensor_names(self, modality: Modality) -> TensorNames:
        return TensorNames(
            (3, self._side, self._side),
            flat=(("pixel_values", "num_patches"),),
            batched=("num_patches",),
            keep_on_cpu=("num_patches",),
        )

    def side_tensors(self, plans: Sequence[ItemPlan]) -> dict[str, npt.NDArray[Any]]:
        return {"num_patches": np.array([plan.grid[0] for plan in plans], np.int64)}

    def side_shapes(self, modality: Modality) -> Mapping[str, tuple[int, ...]]:
        return {"num_patches": ()}

    def claim(
        self, modality: Modality, side: Mapping[str, Sequence[int]], pixels: tuple[int, ...]
    ) -> Claim:
        views = side["num_patches"][0]
        if not 1 <= views <= 1 + (self._most_crops if self._pan_and_scan else 0):
            raise ValueError("the number of its views is not one of the model's")
        return Claim(views, views * self._tile_tokens)
