"""Which spec serves which model. A model that is not listed is never guessed at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from router.vision.files import ModelFiles
from router.vision.models.qwen2_vl import Qwen2VL, Qwen25VL
from router.vision.models.qwen3_vl import Qwen3VL
from router.vision.plan import ModelSpec

_Factory = Callable[[ModelFiles], ModelSpec]

# By config.json's model_type.
_BY_MODEL_TYPE: Mapping[str, _Factory] = {
    "qwen2_vl": Qwen2VL,
    "qwen2_5_vl": Qwen25VL,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VL,
    "qwen3_5": Qwen3VL,
    "qwen3_5_moe": Qwen3VL,
}

# By config.json's architectures, for model types that several families share.
_BY_ARCHITECTURE: Mapping[str, _Factory] = {}


def spec_for(model_type: str, architectures: Sequence[str], files: ModelFiles) -> ModelSpec | None:
    """The spec of a model, None when its family is unknown.

    Raises ValueError, in one sentence, when the family is known but its
    settings are missing or contradict the model.
    """
    for architecture in architectures:
        if architecture in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[architecture](files)
    factory = _BY_MODEL_TYPE.get(model_type)
    return None if factory is None else factory(files)
