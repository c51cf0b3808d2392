"""What each family writes into a prompt and onto the wire."""

from __future__ import annotations

import json
from dataclasses import replace
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
    # Without it every token of a range counts as a placeholder, the breaks among them too.
    silent = batch.message()
    silent.ClearField("im_token_id")
    if spec.interleaves("image"):
        with pytest.raises(Fault) as caught:
            check_mm_inputs([silent], expanded.ids, spec, limits)
        assert caught.value.metadata["check"] == "im_token_id"
    else:
        check_mm_inputs([silent], expanded.ids, spec, limits)


@pytest.mark.parametrize("family", MODELS)
def test_only_families_proven_against_a_worker_are_left_to_it(family: str) -> None:
    proven = {"qwen3_vl": {"image", "video"}, "llama4": {"image"}}
    assert made(family).worker_expandable == proven.get(family, set())


@pytest.mark.parametrize("family", ["phi3_v", "phi3_5_v", "pixtral", "llava_next"])
def test_a_picture_of_less_than_nothing_is_no_claim(family: str) -> None:
    spec = spec_of(family, PROCESSORS[family]["preprocessor_config"])
    plan = spec.plan_image(336, 336, index=0)
    (sizes,) = spec.side_tensors([plan]).values()
    side = {"image_sizes": [int(n) for n in sizes[0]]}
    shape = (1, *plan.output_shape[1:])
    assert spec.claim("image", side, shape).feature_tokens == plan.feature_tokens
    with pytest.raises(ValueError, match="size"):
        spec.claim("image", {"image_sizes": [-n for n in side["image_sizes"]]}, shape)


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


def test_nested_processor_settings_count_before_a_file_of_their_own() -> None:
    nested = b'{"image_processor": {"patch_size": 16}, "video_processor": {"fps": 2}}'
    own = {
        "preprocessor_config__json": b'{"patch_size": 14}',
        "video_preprocessor_config__json": b'{"fps": 3}',
    }
    for others in ({}, own):
        files = ModelFiles.from_archive(archive(processor_config__json=nested, **others))
        assert files.preprocessor_config == {"patch_size": 16}
        assert files.video_preprocessor_config == {"fps": 2}
    files = ModelFiles.from_archive(archive(processor_config__json=b'{"patch_size": 9}', **own))
    assert files.preprocessor_config == {"patch_size": 14}
    assert files.video_preprocessor_config == {"fps": 3}


def test_a_video_processor_without_settings_has_the_image_processors_file() -> None:
    own = archive(preprocessor_config__json=b'{"patch_size": 14}')
    assert ModelFiles.from_archive(own).video_preprocessor_config == {"patch_size": 14}
    # Settings that are nested for the image processor are its own.
    nested = archive(processor_config__json=b'{"image_processor": {"patch_size": 14}}')
    assert ModelFiles.from_archive(nested).video_preprocessor_config == {}


def test_a_message_names_the_file_that_the_settings_stand_in() -> None:
    wrong = PROCESSORS["qwen3_vl"]["preprocessor_config"] | {"patch_size": 0}
    nested = json.dumps({"image_processor": wrong}).encode()
    files = ModelFiles.from_archive(archive(processor_config__json=nested))
    with pytest.raises(ValueError, match=r"^processor_config\.json: image_processor: patch_size"):
        spec_for("qwen3_vl", [], files)


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        (336, (448, 336)),
        ({"shortest_edge": 336}, (448, 336)),
        ({"height": 336, "width": 336}, (336, 336)),
        ({"height": 340, "width": 420}, (420, 340)),
    ],
)
def test_llava_keeps_the_shape_only_where_a_shorter_side_is_given(
    size: Any, resized: tuple[int, int]
) -> None:
    settings = PROCESSORS["clip_llava15"]["preprocessor_config"] | {"size": size}
    (draw,) = spec_of("clip_llava15", settings).plan_image(640, 480, index=0).draws
    assert (draw.width, draw.height) == resized
    assert (draw.window.width, draw.window.height) == (336, 336)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("clip_llava15", {"size": {"shortest_edge": 336, "longest_edge": 500}}, "longest_edge 500"),
        ("clip_llava15", {"size": {"height": 336, "width": 300}}, "crop_size is over size"),
        ("pixtral", {"do_center_crop": True}, "do_center_crop True is not supported"),
    ],
)
def test_settings_that_would_make_other_pixels_are_an_error(
    family: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(family, PROCESSORS[family]["preprocessor_config"] | settings)


@pytest.mark.parametrize(
    ("encoder", "strategy", "tokens"),
    [
        ("clip_vision_model", "default", 576),
        ("clip_vision_model", "full", 577),
        ("siglip_vision_model", "default", 575),
        ("siglip_vision_model", "full", 576),
    ],
)
def test_a_llava_view_has_the_tokens_that_its_encoder_leaves(
    encoder: str, strategy: str, tokens: int
) -> None:
    config = {
        "vision_config": {"model_type": encoder, "patch_size": 14},
        "vision_feature_select_strategy": strategy,
    }
    for family, model_type, others in (
        ("clip_llava15", "llava", 0),
        # A 336x336 picture on a canvas of 672x336: its 24 x 24 patches and a newline a row.
        ("llava_next", "llava_next", 24 * 24 + 24),
    ):
        files = ModelFiles(
            config=config,
            preprocessor_config=PROCESSORS[family]["preprocessor_config"],
            token_ids={"<image>": 5},
        )
        made = spec_for(model_type, (), files)
        assert made is not None
        assert made.plan_image(336, 336, index=0).prompt_tokens == tokens + others


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vision_config": {"model_type": "vit"}}, "model_type 'vit' is not supported"),
        ({"vision_config": {"model_type": ["vit"]}}, r"model_type \['vit'\] is not supported"),
        ({"vision_feature_select_strategy": "mean"}, "strategy 'mean' is not supported"),
        ({"vision_config": {"patch_size": [[14]]}}, "patch_size is not a positive integer"),
    ],
)
def test_a_llava_encoder_whose_tokens_are_not_known_is_an_error(
    config: dict[str, Any], message: str
) -> None:
    for family, model_type in (("clip_llava15", "llava"), ("llava_next", "llava_next")):
        files = ModelFiles(
            config=config,
            preprocessor_config=PROCESSORS[family]["preprocessor_config"],
            token_ids={"<image>": 5},
        )
        with pytest.raises(ValueError, match=message):
            spec_for(model_type, (), files)


@pytest.mark.parametrize(
    ("config", "combined", "message"),
    [
        ({"patch_size": 14}, {}, "patch_size is not the model's"),
        ({}, {"patch_size": 14}, "patch_size is not the model's"),
        ({}, {"spatial_merge_size": 2}, "spatial_merge_size 2 is not supported"),
    ],
)
def test_pixtral_patches_are_those_of_its_model_and_its_combined_processor(
    config: dict[str, Any], combined: dict[str, Any], message: str
) -> None:
    files = ModelFiles(
        config={"vision_config": {"model_type": "pixtral", **config}},
        preprocessor_config=PROCESSORS["pixtral"]["preprocessor_config"],
        processor_config=combined,
        token_ids={"[IMG]": 1, "[IMG_BREAK]": 2, "[IMG_END]": 3},
    )
    with pytest.raises(ValueError, match=message):
        spec_for("llava", [], files)


def test_gemma3_writes_as_many_tokens_as_its_combined_processor_says() -> None:
    files = ModelFiles(
        config={"mm_tokens_per_image": 64},
        preprocessor_config=PROCESSORS["gemma3"]["preprocessor_config"],
        processor_config={"image_seq_length": 64},
        token_ids=GEMMA3_TOKENS,
        encode=encode_bytes,
    )
    made = spec_for("gemma3", [], files)
    assert made is not None
    assert made.plan_image(640, 480, index=0).feature_tokens == 64
    with pytest.raises(ValueError, match="mm_tokens_per_image"):
        spec_for("gemma3", [], replace(files, processor_config={"image_seq_length": 32}))


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
