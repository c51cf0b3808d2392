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


def numbered(*texts: str) -> dict[str, int]:
    return {text: 1000 + number for number, text in enumerate(texts)}


LLAMA4_TOKENS = numbered(
    "<|image|>",
    "<|patch|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)
GEMMA3_TOKENS = numbered("<start_of_image>", "<image_soft_token>", "<end_of_image>")

# Golden family -> (model_type, config.json, added tokens)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "qwen2_vl": ("qwen2_vl", {"image_token_id": 151655}, QWEN_TOKENS),
    "qwen2_5_vl": ("qwen2_5_vl", {"image_token_id": 151655}, QWEN_TOKENS),
    "qwen3_vl": ("qwen3_vl", {"image_token_id": 151655}, QWEN_TOKENS),
    "llama4": ("llama4", {}, LLAMA4_TOKENS),
    "clip_llava15": ("llava", {"image_token_index": 32000}, {"<image>": 32000}),
    "llava_next": ("llava_next", {"image_token_index": 32000}, {"<image>": 32000}),
    "internvl": (
        "internvl",
        {"image_seq_length": 256, "downsample_ratio": 0.5},
        numbered("<IMG_CONTEXT>", "<img>", "</img>"),
    ),
    "gemma3": ("gemma3", {"mm_tokens_per_image": 256}, GEMMA3_TOKENS),
    "gemma3_pan_and_scan": ("gemma3", {"mm_tokens_per_image": 256}, GEMMA3_TOKENS),
    "pixtral": (
        "llava",
        {"image_token_index": 1000, "vision_config": {"model_type": "pixtral"}},
        numbered("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "phi3_v": ("phi3_v", {}, {"<|image|>": 32044}),
    "phi3_5_v": ("phi3_v", {}, {"<|image|>": 32044}),
    "qwen_vl": ("qwen", {"visual": {"image_size": 448}}, {"<imgpad>": 151859}),
}


def spec_of(
    family: str, preprocessor: dict[str, Any], pillow: Any = "pillow13", **overrides: Any
) -> ModelSpec:
    """The spec of a golden family with its preprocessor config and call overrides."""
    model_type, config, tokens = MODELS[family]
    settings = {**preprocessor, **overrides}
    if "size" in overrides:  # a call's size stands for the checkpoint's bounds
        settings = {k: v for k, v in settings.items() if k not in ("min_pixels", "max_pixels")}
    files = ModelFiles(
        config=config, preprocessor_config=settings, token_ids=tokens, encode=encode_bytes
    )
    spec = spec_for(model_type, (), files, pillow=pillow)
    assert spec is not None
    return spec


def plan_only_cases() -> Iterator[Any]:
    """(family, settings, cases) for every list of sizes in the golden data."""
    for family, lists in golden("plan_only.json")["families"].items():
        for number, settings in enumerate(lists):
            if family not in MODELS:
                continue
            known = {k: v for k, v in settings.items() if k in ("size", "num_crops", "max_patches")}
            yield pytest.param(family, known, settings["cases"], id=f"{family}-{number}")
