"""What each family writes into a prompt and onto the wire."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from router.faults import Fault, Reason
from router.vision.backend.cpu import CpuBackend
from router.vision.files import ModelFiles
from router.vision.plan import PixelFormat
from router.vision.registry import spec_for
from router.vision.tensors import build_batch
from router.vision.tensors_check import WireLimits, check_mm_inputs
from tests.vision.families import GEMMA3_TOKENS, LLAMA4_TOKENS, MODELS, encode_bytes, spec_of
from tests.vision.pictures import golden

PROCESSORS = golden("processors.json")["families"]
BACKEND = CpuBackend()
BFLOAT16 = PixelFormat("bfloat16", normalized=True)


def made(family: str, **overrides: Any) -> Any:
    return spec_of(family, PROCESSORS[family]["preprocessor_config"] | overrides)


@pytest.mark.parametrize("family", MODELS)
def test_a_placeholder_range_that_was_seen_stands_for_the_planned_one(family: str) -> None:
    spec = made(family)
    sizes = [(300, 500), (900, 400)]
    truth = [spec.plan_image(*size, index=i) for i, size in enumerate(sizes)]
    guess = [spec.plan_image(640, 480, index=i) for i in range(2)]
    anchor = spec.anchor_ids["image"]
    prompt = [1, anchor, 2, anchor, 3]
    whole = spec.expand(prompt, truth)
    ranges = {
        place: whole.ids[offset : offset + length]
        for place, (offset, length) in enumerate(whole.ranges)
    }
    seen = spec.expand(prompt, guess, ranges)
    assert seen.ids.tolist() == whole.ids.tolist()
    assert seen.ranges == whole.ranges
    half = spec.expand(prompt, [truth[0], guess[1]], {1: ranges[1]})
    assert half.ids.tolist() == whole.ids.tolist()


@pytest.mark.parametrize("family", MODELS)
def test_a_request_of_two_images_passes_its_own_checks(family: str) -> None:
    spec = made(family)
    pictures = [np.zeros((500, 300, 3), np.uint8), np.full((400, 900, 3), 9, np.uint8)]
    plans = [spec.plan_image(p.shape[1], p.shape[0], index=i) for i, p in enumerate(pictures)]
    arrays = [spec.pack(*pair, BFLOAT16, BACKEND) for pair in zip(plans, pictures, strict=True)]
    anchor = spec.anchor_ids["image"]
    expanded = spec.expand([1, anchor, 2, anchor, 3], plans)
    batch = build_batch(spec, plans, arrays, BFLOAT16, expanded.ranges, ["a", "b"])
    for plan, array in zip(plans, arrays, strict=True):
        assert array.shape == plan.output_shape
        assert array.nbytes == plan.output_bytes(BFLOAT16)
    limits = WireLimits(item_limits={"image": 2}, pixels=BFLOAT16)
    checked = check_mm_inputs([batch.message()], expanded.ids, spec, limits)
    assert checked.item_counts == (("image", 2),)
    assert checked.largest_item_tokens == max(plan.feature_tokens for plan in plans)
    for index, (offset, length) in enumerate(expanded.ranges):
        run = expanded.ids[offset : offset + length]
        placeholders = np.count_nonzero(run == spec.placeholder_ids["image"])
        assert placeholders == plans[index].feature_tokens
    longer = batch.message()
    longer.pixel_values.shape[0] += 1
    with pytest.raises(Fault):
        check_mm_inputs([longer], expanded.ids, spec, limits)


@pytest.mark.parametrize("family", MODELS)
def test_only_families_proven_against_a_worker_are_left_to_it(family: str) -> None:
    proven = {"qwen3_vl": {"image", "video"}, "llama4": {"image"}}
    assert made(family).worker_expandable == proven.get(family, set())


def test_llama4_separates_tiles_and_rows() -> None:
    spec = made("llama4")
    plan = spec.plan_image(640, 480, index=0)
    assert plan.grid == (2, 2)
    ids = spec.expand([LLAMA4_TOKENS["<|image|>"]], [plan]).ids
    named = {number: text for text, number in LLAMA4_TOKENS.items()}
    runs: list[str] = []
    for token in ids.tolist():
        if named[token] != "<|patch|>" or runs[-1] != "<|patch|>":
            runs.append(named[token])
    row = ["<|patch|>", "<|tile_x_separator|>", "<|patch|>", "<|tile_y_separator|>"]
    assert runs == [
        "<|image_start|>",
        *row,
        *row,
        "<|image|>",
        "<|patch|>",
        "<|image_end|>",
    ]


def test_pixtral_breaks_after_each_row() -> None:
    spec = made("pixtral")
    plan = spec.plan_image(48, 32, index=0)
    assert spec.expand([1000], [plan]).ids.tolist() == [1000] * 3 + [1001] + [1000] * 3 + [1002]


def test_gemma3_words_its_crops() -> None:
    spec = made("gemma3_pan_and_scan")
    plan = spec.plan_image(640, 480, index=0)
    begin, soft, end = GEMMA3_TOKENS.values()
    view = [10, 10, begin, *[soft] * 256, end, 10, 10]
    expected = [
        *encode_bytes("Here is the original image "),
        *view,
        *encode_bytes(" and here are some crops to help you see better "),
        *view,
        32,
        *view,
    ]
    assert spec.expand([begin], [plan]).ids.tolist() == expected
    assert plan.prompt_tokens == len(expected)


def test_placeholders_of_an_earlier_expansion_are_a_mismatch() -> None:
    spec = made("gemma3")
    plan = spec.plan_image(640, 480, index=0)
    begin, soft, _ = GEMMA3_TOKENS.values()
    with pytest.raises(Fault) as caught:
        spec.expand([begin, soft, soft], [plan])
    assert caught.value.reason is Reason.ANCHOR_MISMATCH
    assert caught.value.metadata["expanded"] == "2"


def test_an_unknown_family_has_no_spec() -> None:
    assert spec_for("llama", ["LlamaForCausalLM"], ModelFiles()) is None
    settings = PROCESSORS["qwen3_vl"]["preprocessor_config"]
    files = ModelFiles(preprocessor_config=settings, token_ids={"<|image_pad|>": 1})
    assert spec_for("qwen3_vl", ["Qwen3VLForRetrieval"], files) is None
    assert spec_for("qwen3_vl", ["Qwen3VLForConditionalGeneration"], files) is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_std": [0.5, 0.5]}, "image_std does not hold three numbers"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std is not positive"),
        ({"patch_size": 14}, "differ: patch_size 14 and 16"),
        ({"resample": 0}, "resample 0 is not supported"),
        ({"do_normalize": False}, "do_normalize false is not supported"),
        ({"size": {"shortest_edge": 65536}}, "longest_edge is missing"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "over the largest"),
        ({"merge_size": -2}, "merge_size is not a positive integer"),
    ],
)
def test_settings_that_cannot_be_are_an_error(settings: dict[str, Any], message: str) -> None:
    files = ModelFiles(
        config={"vision_config": {"patch_size": 16}},
        preprocessor_config=PROCESSORS["qwen3_vl"]["preprocessor_config"] | settings,
        token_ids={"<|image_pad|>": 1},
    )
    with pytest.raises(ValueError, match=message):
        spec_for("qwen3_vl", [], files)


def test_token_ids_that_contradict_are_an_error() -> None:
    files = ModelFiles(
        config={"image_token_id": 2},
        preprocessor_config=PROCESSORS["qwen3_vl"]["preprocessor_config"],
        token_ids={"<|image_pad|>": 1},
    )
    with pytest.raises(ValueError, match="different ids"):
        spec_for("qwen3_vl", [], files)


def archive(**changes: bytes) -> dict[str, bytes]:
    tokens = [{"id": 7, "content": "<|image_pad|>", "special": True}]
    members = {"tokenizer.json": json.dumps({"added_tokens": tokens}).encode()}
    return members | {name.replace("__", "."): raw for name, raw in changes.items()}


def test_an_archive_is_read_by_the_names_of_its_files() -> None:
    files = ModelFiles.from_archive(archive(config__json=b'{"model_type": "x"}'))
    assert files.config == {"model_type": "x"}
    assert files.token_ids == {"<|image_pad|>": 7}
    assert files.preprocessor_config == {}


def test_nested_processor_settings_count_where_a_file_of_their_own_is_missing() -> None:
    nested = b'{"image_processor": {"patch_size": 16}, "video_processor": {"fps": 2}}'
    files = ModelFiles.from_archive(archive(processor_config__json=nested))
    assert files.preprocessor_config == {"patch_size": 16}
    assert files.video_preprocessor_config == {"fps": 2}
    both = archive(processor_config__json=nested, preprocessor_config__json=b'{"patch_size": 14}')
    assert ModelFiles.from_archive(both).preprocessor_config == {"patch_size": 14}


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_named(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"^config\.json is not"):
        ModelFiles.from_archive(archive(config__json=raw))


def test_the_archives_own_tokenizer_encodes_timestamps() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 3, "b": 4, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    files = ModelFiles.from_archive({"tokenizer.json": tokenizer.to_str().encode()})
    assert files.encode is not None
    assert list(files.encode("a b c")) == [3, 4, 0]
