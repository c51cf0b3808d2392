"""Sizes, grids and token counts against the reference, without pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from router.faults import Fault, Reason
from router.vision.plan import PixelFormat
from tests.vision.families import plan_only_cases, spec_of
from tests.vision.pictures import golden

PROCESSORS = golden("processors.json")["families"]
UINT8 = PixelFormat("uint8", normalized=False)


@pytest.mark.parametrize(("family", "overrides", "cases"), list(plan_only_cases()))
def test_sizes_equal_the_reference(
    family: str, overrides: dict[str, Any], cases: list[dict[str, Any]]
) -> None:
    spec = spec_of(family, PROCESSORS[family]["preprocessor_config"], **overrides)
    for case in cases:
        if case.get("error"):
            with pytest.raises(Fault) as caught:
                spec.plan_image(case["width"], case["height"], index=0)
            assert caught.value.reason is Reason.MEDIA_ASPECT_RATIO
            continue
        plan = spec.plan_image(case["width"], case["height"], index=0)
        where = f"{case['width']}x{case['height']}"
        assert plan.feature_tokens == case["image_tokens"], where
        if "prompt_tokens" in case:
            expanded = spec.expand([spec.anchor_ids["image"]], [plan])
            around = 2 if family.startswith("qwen") else 0
            assert len(expanded.ids) + around == case["prompt_tokens"], where
        if "grid_thw" in case:
            assert list(plan.grid) == case["grid_thw"], where
        if "canvas_height" in case:
            assert (plan.height, plan.width) == (case["canvas_height"], case["canvas_width"])
        if "resized_height" in case and family not in ("phi3_v", "phi3_5_v"):
            drawn = plan.draws[0]
            assert (drawn.height, drawn.width) == (case["resized_height"], case["resized_width"])
        if "aspect_ratio" in case:
            assert list(plan.grid) == case["aspect_ratio"], where
        if "tile_rows" in case:
            assert plan.grid == (case["tile_rows"], case["tile_columns"]), where
        if "tiles" in case and family in ("llama4", "internvl"):
            assert plan.output_shape[0] == case["tiles"], where


def qwen3(**settings: Any) -> Any:
    return spec_of("qwen3_vl", PROCESSORS["qwen3_vl"]["preprocessor_config"], **settings)


def test_a_bound_on_the_long_side_is_never_passed_by_rounding() -> None:
    for limit in (500, 700, 1000, 1010, 1024):
        plan = qwen3().plan_image(4032, 3024, index=0, max_long_side=limit)
        assert max(plan.width, plan.height) <= limit
        assert plan.hint == f"max_long_side={limit}"


def test_a_bound_that_changes_nothing_leaves_no_hint() -> None:
    free = qwen3().plan_image(640, 480, index=0)
    assert qwen3().plan_image(640, 480, index=0, max_long_side=640) == free


def test_memory_is_known_before_work() -> None:
    plan = qwen3().plan_image(4032, 3024, index=0)
    assert plan.output_bytes(UINT8) == 47376 * 1536
    assert plan.output_bytes(PixelFormat("bfloat16", normalized=True)) == 2 * 47376 * 1536


def test_normalised_uint8_does_not_exist() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        PixelFormat("uint8", normalized=True)


def test_an_extreme_picture_is_refused_with_the_limit() -> None:
    with pytest.raises(Fault) as caught:
        qwen3().plan_image(2500, 10, index=3)
    assert caught.value.reason is Reason.MEDIA_ASPECT_RATIO
    assert caught.value.metadata["index"] == "3"
    assert caught.value.metadata["limit"] == "200"


@pytest.mark.parametrize(("width", "height"), [(1, 65_535), (1 << 20, 1), (3, 20_000)])
def test_a_picture_that_would_be_resized_to_gigabytes_is_refused(width: int, height: int) -> None:
    spec = spec_of("clip_llava15", PROCESSORS["clip_llava15"]["preprocessor_config"])
    with pytest.raises(Fault) as caught:
        spec.plan_image(width, height, index=3)
    assert caught.value.reason is Reason.MEDIA_ASPECT_RATIO
    assert caught.value.metadata["index"] == "3"
    assert spec.plan_image(30, 20_000, index=0).feature_tokens == 576


def test_each_anchor_becomes_its_items_tokens() -> None:
    spec = qwen3()
    plans = [spec.plan_image(640, 480, index=0), spec.plan_image(320, 256, index=1)]
    anchor = spec.anchor_ids["image"]
    expanded = spec.expand([1, 7, anchor, 8, 2, 7, anchor, 8, 3], plans)
    assert expanded.ids.dtype == np.uint32
    assert expanded.ranges == ((2, 300), (2 + 300 + 3, 80))
    assert len(expanded.ids) == 7 + 300 + 80
    for offset, length in expanded.ranges:
        assert set(expanded.ids[offset : offset + length].tolist()) == {anchor}
        assert expanded.ids[offset - 1] == 7
        assert expanded.ids[offset + length] == 8


@pytest.mark.parametrize("anchors", [0, 1, 3, 300])
def test_anchors_that_do_not_match_the_items_are_counted(anchors: int) -> None:
    spec = qwen3()
    plans = [spec.plan_image(640, 480, index=i) for i in range(2)]
    with pytest.raises(Fault) as caught:
        spec.expand([1] + [spec.anchor_ids["image"]] * anchors, plans)
    assert caught.value.reason is Reason.ANCHOR_MISMATCH
    assert str(caught.value) == f"input_ids hold {anchors} media anchors for 2 media items"
    assert caught.value.metadata["found"] == str(anchors)
    assert caught.value.metadata["items"] == "2"
    assert caught.value.metadata["found_image"] == str(anchors)


def test_a_prompt_without_media_is_left_alone() -> None:
    assert qwen3().expand([1, 2, 3], []).ids.tolist() == [1, 2, 3]


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"preprocessor_config\.json: patch_size is missing"):
        qwen3(patch_size=None)


def test_a_setting_that_nobody_understands_is_reported() -> None:
    assert qwen3(sharpen=3).warnings == (
        "preprocessor_config.json: sharpen is not understood and was ignored",
    )
