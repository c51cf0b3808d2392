"""Qwen-VL, the first: one squashed square, resized by Pillow."""

from __future__ import annotations

from router.vision.files import ModelFiles
from router.vision.geometry import Rule
from router.vision.models.image_only import SquareSpec, config_value, one_tile, squash
from router.vision.plan import ItemPlan
from router.vision.settings import Reader, model_token
from router.vision.values import Normalization

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class QwenVL(SquareSpec):
    """Qwen-VL checkpoints, whose processor is code of the checkpoint itself.

    That code holds what other families keep in a preprocessor_config.json, so
    its values stand here; `visual` of config.json wins where it has them.
    """

    family = "qwen_vl"

    def __init__(self, files: ModelFiles, rule: Rule = "pillow13") -> None:
        config, tokens = files.config, files.token_ids
        super().__init__(model_token({}, tokens, "", "<imgpad>"), "<img><imgpad></img>")
        read = Reader(files.preprocessor_config, files.image_file)
        side = config_value(config, "visual", "image_size")
        self._side = side if isinstance(side, int) else read.positive("image_size", 448)
        queries = config_value(config, "visual", "n_queries")
        self._tokens = queries if isinstance(queries, int) else 256
        self.normalization = Normalization(_CLIP_MEAN, _CLIP_STD, formula="to_tensor")
        if read.get("image_mean") is not None:
            self.normalization = read.normalization("to_tensor")
        self.warnings = read.warnings()
        self._rule: Rule = rule

    def _plan(self, index: int, source: tuple[int, int], size: tuple[int, int]) -> ItemPlan:
        return ItemPlan(
            modality="image",
            index=index,
            source_width=source[0],
            source_height=source[1],
            width=self._side,
            height=self._side,
            grid=(1, 1),
            draws=(squash(source, one_tile(self._side), "bicubic", self._rule),),
            output_shape=(1, 3, self._side, self._side),
            feature_tokens=self._tokens,
            prompt_tokens=self._tokens + 2,
        )
