"""LLaVA 1.5: one square view, its shortest side fitted and its middle kept."""

from __future__ import annotations

from router.vision.files import ModelFiles
from router.vision.geometry import Box, Draw, whole
from router.vision.models.image_only import SquareSpec, encoder_patch, one_tile
from router.vision.plan import ItemPlan
from router.vision.settings import Reader, model_token


class Llava(SquareSpec):
    """LLaVA 1.5 checkpoints with a CLIP processor."""

    family = "llava"

    def __init__(self, files: ModelFiles) -> None:
        token = model_token(files.config, files.token_ids, "image_token_index", "<image>")
        super().__init__(token, "<image>")
        read = Reader(files.preprocessor_config, "preprocessor_config.json")
        self._short = read.side("size")
        self._side = read.side("crop_size")
        if self._side > self._short:
            raise ValueError("preprocessor_config.json: crop_size is over size")
        read.only("do_resize", True)
        read.only("do_center_crop", True)
        read.only("do_pad", False)
        read.only("resample", 3)
        self.normalization = read.normalization()
        self.warnings = read.warnings()
        patches = self._side // encoder_patch(files.config, 14)
        # The class token is dropped unless the model says "full".
        extra = files.config.get("vision_feature_select_strategy", "default") == "full"
        self._tokens = patches * patches + int(extra)

    def _plan(self, index: int, source: tuple[int, int], size: tuple[int, int]) -> ItemPlan:
        width, height = source
        long = int(self._short * max(source) / min(source))
        new_width, new_height = (self._short, long) if width <= height else (long, self._short)
        window = Box(
            (new_width - self._side) // 2, (new_height - self._side) // 2, self._side, self._side
        )
        draw = Draw(
            crop=whole(width, height),
            height=new_height,
            width=new_width,
            window=window,
            filter="bicubic",
            rule="torch",
            layout=one_tile(self._side),
        )
        return ItemPlan(
            modality="image",
            index=index,
            source_width=width,
            source_height=height,
            width=self._side,
            height=self._side,
            grid=(1, 1),
            draws=(draw,),
            output_shape=(1, 3, self._side, self._side),
            feature_tokens=self._tokens,
            prompt_tokens=self._tokens,
        )
