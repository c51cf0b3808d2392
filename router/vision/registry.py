"""Which spec serves which model. A model that is not listed is never guessed at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from router.vision.files import ModelFiles
from router.vision.geometry import Rule
from router.vision.models.gemma3 import Gemma3
from router.vision.models.internvl import InternVL
from router.vision.models.llama4 import Llama4
from router.vision.models.llava import Llava
from router.vision.models.llava_next import LlavaNext
from router.vision.models.phi3_v import Phi3V
from router.vision.models.pixtral import Pixtral
from router.vision.models.qwen2_vl import Qwen2VL, Qwen25VL
from router.vision.models.qwen3_vl import Qwen3VL
from router.vision.models.qwen_vl import QwenVL
from router.vision.plan import ModelSpec

_Factory = Callable[[ModelFiles], ModelSpec]


def _llava(files: ModelFiles) -> ModelSpec:
    """LLaVA's model type is also that of Pixtral behind a LLaVA head."""
    encoder = files.config.get("vision_config")
    if isinstance(encoder, Mapping) and encoder.get("model_type") == "pixtral":
        return Pixtral(files)
    return Llava(files)


# By config.json's model_type.
_BY_MODEL_TYPE: Mapping[str, _Factory] = {
    "gemma3": Gemma3,
    "internvl": InternVL,
    "llama4": Llama4,
    "llava": _llava,
    "llava_next": LlavaNext,
    "qwen2_vl": Qwen2VL,
    "qwen2_5_vl": Qwen25VL,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VL,
    "qwen3_5": Qwen3VL,
    "qwen3_5_moe": Qwen3VL,
}

# Other heads on the same encoder (retrieval, rewards) have the same model type.
_ARCHITECTURES: Mapping[str, str] = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "InternVLForConditionalGeneration": "internvl",
    "Llama4ForConditionalGeneration": "llama4",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "Phi3VForCausalLM": "phi3_v",
    "QWenLMHeadModel": "qwen_vl",
    "QwenVLForConditionalGeneration": "qwen_vl",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}

# Families whose own code resizes with Pillow, so that its version matters.
_BY_PILLOW: Mapping[str, Callable[[ModelFiles, Rule], ModelSpec]] = {
    "phi3_v": Phi3V,
    "qwen_vl": QwenVL,
}


def spec_for(
    model_type: str,
    architectures: Sequence[str],
    files: ModelFiles,
    *,
    pillow: Literal["pillow12", "pillow13"] = "pillow13",
) -> ModelSpec | None:
    """The spec of a model, None when its family is unknown.

    `model_type` and `architectures` are config.json's; where no architecture is
    given the type alone decides. `pillow` is the rounding rule of the workers'
    Pillow, for the families that resize with it. Raises ValueError, in one
    sentence, when the family is known but its settings are missing or
    contradict the model.
    """
    # The first Qwen-VL shares its model type with text models.
    if model_type == "qwen" and "visual" in files.config:
        model_type = "qwen_vl"
    if architectures and all(_ARCHITECTURES.get(name) != model_type for name in architectures):
        return None
    if model_type in _BY_PILLOW:
        return _BY_PILLOW[model_type](files, pillow)
    factory = _BY_MODEL_TYPE.get(model_type)
    return None if factory is None else factory(files)
