"""What the families that take only images have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from router.faults import Fault, Reason
from router.vision.geometry import Draw, Filter, Layout, Rule, Tiles, whole
from router.vision.plan import Claim, ItemPlan, Modality, ModelSpec, Replacement, TensorNames
from router.vision.settings import shrunk

# Tokens before an encoder's patches, by vision_config's model_type.
_CLASS_TOKENS: Mapping[str, int] = {"clip_vision_model": 1, "siglip_vision_model": 0}


class ImageSpec(ModelSpec):
    """A family whose only modality is images.

    Subclasses give `_plan`, and `replacement` where an anchor becomes more than
    a run of placeholders.
    """

    modalities: frozenset[Modality] = frozenset({"image"})

    def __init__(self, anchor: int, anchor_text: str, placeholder: int | None = None) -> None:
        self.anchor_ids: Mapping[Modality, int] = {"image": anchor}
        self.anchor_texts: Mapping[Modality, str] = {"image": anchor_text}
        token = anchor if placeholder is None else placeholder
        self.placeholder_ids: Mapping[Modality, int] = {"image": token}

    def plan_image(
        self, width: int, height: int, *, index: int, max_long_side: int | None = None
    ) -> ItemPlan:
        free = self._plan(index, (width, height), (width, height))
        bounded = shrunk(width, height, max_long_side)
        if bounded == (width, height):
            return free
        plan = self._plan(index, (width, height), bounded)
        return plan if plan == free else replace(plan, hint=f"max_long_side={max_long_side}")

    @abstractmethod
    def _plan(self, index: int, source: tuple[int, int], size: tuple[int, int]) -> ItemPlan:
        """Plan a picture of `source` (width, height) as though it were of `size`.

        They differ only where a client bounds the size; draws read the source.
        """

    def replacement(self, plan: ItemPlan) -> Replacement:
        tokens = plan.feature_tokens
        return Replacement(np.full(tokens, self.placeholder_ids["image"], np.uint32), 0, tokens)


class SquareSpec(ImageSpec):
    """A family for which every picture is one square of `_side` and becomes `_tokens` tokens.

    No tensor but the pixels says anything of it.
    """

    _side: int
    _tokens: int

    def tensor_names(self, modality: Modality) -> TensorNames:
        return TensorNames((3, self._side, self._side), batched=("pixel_values",))

    def side_tensors(self, plans: Sequence[ItemPlan]) -> dict[str, npt.NDArray[Any]]:
        return {}

    def side_shapes(self, modality: Modality) -> Mapping[str, tuple[int, ...]]:
        return {}

    def claim(
        self, modality: Modality, side: Mapping[str, Sequence[int]], pixels: tuple[int, ...]
    ) -> Claim:
        return Claim(1, self._tokens)


def squash(
    source: tuple[int, int],
    layout: Layout,
    filter: Filter,
    rule: Rule = "torch",
    start: int = 0,
) -> Draw:
    """The whole picture of `source` (width, height) stretched over a layout."""
    return Draw(
        crop=whole(*source),
        height=layout.height,
        width=layout.width,
        window=whole(layout.width, layout.height),
        filter=filter,
        rule=rule,
        layout=layout,
        start=start,
    )


def one_tile(side: int) -> Tiles:
    return Tiles(1, 1, side, side)


def config_value(config: Mapping[str, Any], *path: str) -> Any:
    """The value at `path` of nested settings, None where it is missing."""
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def encoder_patch(config: Mapping[str, Any], default: int) -> int:
    """The side of the encoder's patches, from config.json's vision_config."""
    patch = config_value(config, "vision_config", "patch_size")
    if isinstance(patch, list) and patch and patch.count(patch[0]) == len(patch):
        patch = patch[0]
    if patch is None:
        return default
    if isinstance(patch, bool) or not isinstance(patch, int) or patch <= 0:
        raise ValueError("config.json: vision_config.patch_size is not a positive integer")
    return patch


def view_tokens(config: Mapping[str, Any], patches: int) -> int:
    """The tokens of one view of `patches` x `patches` behind a LLaVA head.

    CLIP's encoder puts a class token before its patches and SigLIP's does not;
    the first token is dropped unless config.json says "full".
    """
    encoder = config_value(config, "vision_config", "model_type") or "clip_vision_model"
    if not isinstance(encoder, str) or encoder not in _CLASS_TOKENS:
        raise ValueError(f"config.json: vision_config.model_type {encoder!r} is not supported")
    strategy = config_value(config, "vision_feature_select_strategy") or "default"
    if strategy not in ("default", "full"):
        raise ValueError(
            f"config.json: vision_feature_select_strategy {strategy!r} is not supported"
        )
    return patches * patches + _CLASS_TOKENS[encoder] - int(strategy == "default")


def too_extreme(index: int, source: tuple[int, int], family: str) -> Fault:
    """A picture so narrow that nothing is left of a side."""
    return Fault.of_item(
        Reason.MEDIA_ASPECT_RATIO,
        index,
        f"{source[0]}x{source[1]} is too narrow for {family}: a side shrinks to nothing",
        width=source[0],
        height=source[1],
    )
