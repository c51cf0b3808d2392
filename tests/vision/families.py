"""A spec for each golden family, from settings like its checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from router.vision.files import ModelFiles
from router.vision.plan import ModelSpec
from router.vision.registry import spec_for
from tests.vision.pictures import golden

QWEN_TOKENS = {
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}


def encode_bytes(text: str) -> list[int]:
    """A tokenizer for tests: one token a byte."""
    return list(text.encode())


# Golden family -> (model_type, config.json, added tokens, anchor id of an image)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "qwen2_vl": ("qwen2_vl", {"image_token_id": 151655}, {"<|image_pad|>": 151655}),
    "qwen2_5_vl": ("qwen2_5_vl", {"image_token_id": 151655}, {"<|image_pad|>": 151655}),
    "qwen3_vl": ("qwen3_vl", {"image_token_id": 151655}, {"<|image_pad|>": 151655}),
}


def spec_of(family: str, preprocessor: dict[str, Any], **overrides: Any) -> ModelSpec:
    """The spec of a golden family with its preprocessor config and call overrides."""
    model_type, config, tokens = MODELS[family]
    settings = {**preprocessor, **overrides}
    if "size" in overrides:  # a call's size stands for the checkpoint's bounds
        settings = {k: v for k, v in settings.items() if k not in ("min_pixels", "max_pixels")}
    files = ModelFiles(config=config, preprocessor_config=settings, token_ids=tokens)
    spec = spec_for(model_type, (), files)
    assert spec is not None
    return spec


def plan_only_cases() -> Iterator[Any]:
    """(family, settings, cases) for every list of sizes in the golden data."""
    for family, lists in golden("plan_only.json")["families"].items():
        for number, settings in enumerate(lists):
            if family not in MODELS:
                continue
            known = {k: v for k, v in settings.items() if k in ("size", "patch_size", "merge_size")}
            yield pytest.param(family, known, settings["cases"], id=f"{family}-{number}")
