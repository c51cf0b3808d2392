"""Every golden entry of the reference processors, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from router.faults import Fault, Reason
from router.vision.backend.cpu import CpuBackend
from router.vision.plan import ItemPlan, ModelSpec, PixelFormat
from router.vision.tensors import join
from tests.vision.families import MODELS, spec_of
from tests.vision.pictures import golden, picture

PROCESSORS = golden("processors.json")["families"]
BACKEND = CpuBackend()
FORMATS = {
    "uint8 raw patches": PixelFormat("uint8", normalized=False),
    "float32": PixelFormat("float32", normalized=True),
    "bfloat16": PixelFormat("bfloat16", normalized=True),
    "bfloat16 (cast from float32)": PixelFormat("bfloat16", normalized=True),
}
CASES = [
    pytest.param(family, case, id=f"{family}-{'+'.join(case['images'])}-{number}")
    for family in MODELS
    for number, case in enumerate(PROCESSORS[family]["cases"])
]


def sha256(parts: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.reshape(-1).view(np.uint8))
    return digest.hexdigest()


@pytest.mark.parametrize(("family", "case"), CASES)
def test_tensors_equal_the_reference(family: str, case: dict[str, Any]) -> None:
    settings = PROCESSORS[family]["preprocessor_config"] | (case.get("call_overrides") or {})
    if "call_overrides" in case:  # a call's size stands for the checkpoint's bounds
        settings = {k: v for k, v in settings.items() if k not in ("min_pixels", "max_pixels")}
    spec = spec_of(family, settings)
    pictures = [picture(name) for name in case["images"]]
    if case.get("error"):
        with pytest.raises(Fault) as caught:
            plans_of(spec, pictures)
        assert caught.value.reason is Reason.MEDIA_ASPECT_RATIO
        return
    plans = plans_of(spec, pictures)
    for plan, expected in zip(plans, case["plan"], strict=True):
        assert plan.feature_tokens == expected["image_tokens"]
        if "prompt_tokens" in expected:
            assert plan.prompt_tokens == expected["prompt_tokens"]
    side = spec.side_tensors(plans)
    if family.startswith("gemma3"):
        side["num_crops"] = side["num_patches"] - 1
    if family == "internvl":
        side["num_patches"] = side["image_num_patches"]
    for tensor in case["tensors"]:
        if tensor["name"] != "pixel_values":
            assert side[tensor["name"]].tolist() == tensor["values"]
            assert side[tensor["name"]].dtype == tensor["dtype"]
            continue
        if tensor.get("pillow", "").startswith("12"):
            packer = spec_of(family, settings, pillow="pillow12")
        else:
            packer = spec
        pixel_format = FORMATS[tensor["variant"]]
        arrays = [
            packer.pack(plan, pixels, pixel_format, BACKEND)
            for plan, pixels in zip(plans_of(packer, pictures), pictures, strict=True)
        ]
        shape, parts = join(arrays)
        assert list(shape) == tensor["shape"]
        assert sha256(parts) == tensor["sha256"], (tensor["variant"], tensor.get("pillow"))


def plans_of(spec: ModelSpec, pictures: list[np.ndarray]) -> list[ItemPlan]:
    return [
        spec.plan_image(pixels.shape[1], pixels.shape[0], index=index)
        for index, pixels in enumerate(pictures)
    ]
