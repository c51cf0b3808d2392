"""Videos: frames, sizes, timestamps, tokens and tensors, against the reference."""

from __future__ import annotations

import hashlib
import io
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
import pytest

from router.faults import Fault, Reason
from router.vision.backend.cpu import CpuBackend
from router.vision.files import ModelFiles
from router.vision.models.qwen3_vl import Qwen3VL
from router.vision.plan import ItemPlan, ModelSpec, PixelFormat
from router.vision.registry import spec_for
from router.vision.sampling import timestamps
from router.vision.tensors import build_batch
from router.vision.tensors_check import WireLimits, check_mm_inputs
from tests.vision.families import QWEN_TOKENS, encode_bytes
from tests.vision.pictures import DATA, golden

VIDEO = golden("video.json")
BACKEND = CpuBackend()
RAW = PixelFormat("uint8", normalized=False)
FORMATS = {
    "uint8 raw patches": RAW,
    "float32": PixelFormat("float32", normalized=True),
    "bfloat16 (cast from float32)": PixelFormat("bfloat16", normalized=True),
}


@lru_cache(maxsize=1)
def clip() -> np.ndarray:
    """All frames of the golden clip, uint8 [90, 240, 320, 3], RGB."""
    raw = io.BytesIO((DATA / "video" / VIDEO["file"]).read_bytes())
    capture = cv2.VideoCapture(raw, cv2.CAP_FFMPEG, [])
    frames = []
    while True:
        more, frame = capture.read()
        if not more:
            return np.stack(frames)
        frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))


def spec(model_type: str = "qwen3_vl", **video: Any) -> ModelSpec:
    patch = 16 if model_type == "qwen3_vl" else 14
    image = golden("processors.json")["families"][model_type]["preprocessor_config"]
    files = ModelFiles(
        preprocessor_config=image,
        video_preprocessor_config={
            **VIDEO["video_preprocessor_config"],
            "patch_size": patch,
            **video,
        },
        token_ids=QWEN_TOKENS,
        encode=encode_bytes,
    )
    made = spec_for(model_type, (), files)
    assert made is not None
    return made


def planned(made: ModelSpec, sampling: dict[str, Any]) -> ItemPlan:
    return made.plan_video(
        320, 240, index=0, total_frames=90, fps=30.0, sample_fps=sampling.get("fps")
    )


def of(case: dict[str, Any]) -> ModelSpec:
    """The spec of a golden case; a number of frames is a checkpoint's, not a client's, to give."""
    fixed = {k: v for k, v in case["sampling"].items() if k == "num_frames"}
    return spec(**case["init_overrides"], **fixed)


CASES = VIDEO["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_a_plan_equals_the_reference(case: dict[str, Any]) -> None:
    plan = planned(of(case), case["sampling"])
    assert list(plan.frames) == case["frame_indices"]
    assert (plan.height, plan.width) == (case["resized_height"], case["resized_width"])
    assert list(plan.grid) == case["video_grid_thw"]
    assert plan.feature_tokens == case["video_tokens"]
    assert list(plan.timestamps) == case["timestamps"]
    assert [f"<{t:.1f} seconds>" for t in plan.timestamps] == case["timestamp_texts"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_patches_equal_the_reference(case: dict[str, Any]) -> None:
    frames = clip()
    hashes = [hashlib.sha256(frame.tobytes()).hexdigest() for frame in frames]
    if hashes != VIDEO["all_frames_rgb_sha256"]:
        pytest.skip("this FFmpeg converts colours otherwise than the golden data's")
    made = of(case)
    plan = planned(made, case["sampling"])
    for tensor in case["tensors"]:
        out = made.pack(plan, frames[list(plan.frames)], FORMATS[tensor["variant"]], BACKEND)
        assert list(out.shape) == tensor["shape"]
        assert hashlib.sha256(out.tobytes()).hexdigest() == tensor["sha256"]


def test_an_odd_number_of_frames_repeats_the_last() -> None:
    case = next(c for c in CASES if "num_frames" in c["sampling"])
    assert list(timestamps(case["frame_indices"], 30.0, 2)) == case["timestamps"]


def test_each_temporal_patch_stands_behind_its_timestamp() -> None:
    made = spec()
    plan = planned(made, {"fps": 2})
    expanded = made.expand([1, made.anchor_ids["video"], 2], [plan])
    start, end = QWEN_TOKENS["<|vision_start|>"], QWEN_TOKENS["<|vision_end|>"]
    pad = made.anchor_ids["video"]
    expected = [1]
    for text in ("<0.3 seconds>", "<1.5 seconds>", "<2.7 seconds>"):
        expected += [*encode_bytes(text), start, *[pad] * 80, end]
    assert expanded.ids.tolist() == [*expected, 2]
    assert expanded.ranges == ((1, len(expected) - 1),)
    assert plan.prompt_tokens == len(expected) - 1 + 2


def test_a_request_with_image_and_video_passes_the_checks() -> None:
    made = spec()
    plans = [made.plan_image(320, 256, index=0), planned(made, {"fps": 2})]
    image, video = made.anchor_ids["image"], made.anchor_ids["video"]
    expanded = made.expand([9, image, 8, video, 7], plans)
    pictures = [np.zeros((256, 320, 3), np.uint8), clip()[list(plans[1].frames)]]
    batches = [
        build_batch(
            made,
            [plan],
            [made.pack(plan, pixels, RAW, BACKEND)],
            RAW,
            [expanded.ranges[number]],
            [f"{number}"],
        ).message()
        for number, (plan, pixels) in enumerate(zip(plans, pictures, strict=True))
    ]
    checked = check_mm_inputs(batches, expanded.ids, made, WireLimits(pixels=RAW))
    assert checked.item_counts == (("image", 1), ("video", 1))
    with pytest.raises(Fault) as caught:
        check_mm_inputs(batches[1:], expanded.ids, made, WireLimits())
    assert caught.value.metadata["check"] == "uncovered"


def test_anchors_of_the_wrong_modality_are_a_mismatch() -> None:
    made = spec()
    plans = [made.plan_image(320, 256, index=0), planned(made, {})]
    image, video = made.anchor_ids["image"], made.anchor_ids["video"]
    with pytest.raises(Fault) as caught:
        made.expand([video, image], plans)
    assert caught.value.reason is Reason.ANCHOR_MISMATCH
    assert "in another order of modalities" in str(caught.value)


def test_an_unknown_rate_counts_as_24_frames_a_second() -> None:
    made = spec()
    unknown = made.plan_video(320, 240, index=0, total_frames=96, fps=None)
    assert unknown == made.plan_video(320, 240, index=0, total_frames=96, fps=24.0)


def test_a_single_frame_is_no_video() -> None:
    with pytest.raises(Fault) as caught:
        spec().plan_video(320, 240, index=2, total_frames=1, fps=30.0)
    assert caught.value.reason is Reason.MEDIA_FORMAT_UNSUPPORTED
    assert caught.value.metadata["index"] == "2"


def test_hints_of_a_video_are_part_of_it_only_when_they_change_it() -> None:
    made = spec()
    assert planned(made, {"fps": 2.0}).hint == ""
    assert planned(made, {"fps": 4.0}).hint == "fps=4.0"
    small = made.plan_video(320, 240, index=0, total_frames=90, fps=30.0, max_long_side=160)
    assert small.hint == "max_long_side=160"
    assert small.width <= 160


def test_a_model_without_video_settings_takes_no_video() -> None:
    image = golden("processors.json")["families"]["qwen3_vl"]["preprocessor_config"]
    made = Qwen3VL(ModelFiles(preprocessor_config=image, token_ids=QWEN_TOKENS))
    assert made.modalities == {"image"}
    assert made.worker_expandable == {"image", "video"}
    with pytest.raises(Fault) as caught:
        made.plan_video(320, 240, index=0, total_frames=90, fps=30.0)
    assert caught.value.reason is Reason.MULTIMODAL_NOT_SUPPORTED


def test_a_timestamp_is_written_once_however_often_it_is_needed() -> None:
    written: list[str] = []

    def encode(text: str) -> list[int]:
        written.append(text)
        return list(encode_bytes(text))

    image = golden("processors.json")["families"]["qwen3_vl"]["preprocessor_config"]
    made = Qwen3VL(
        ModelFiles(
            preprocessor_config=image,
            video_preprocessor_config=VIDEO["video_preprocessor_config"],
            token_ids=QWEN_TOKENS,
            encode=encode,
        )
    )
    plans = [
        made.plan_video(320, 240, index=i, total_frames=90, fps=30.0, sample_fps=2.0)
        for i in range(2)
    ]
    assert made.replacement(plans[0]).ids.tolist() == made.replacement(plans[1]).ids.tolist()
    assert len(written) == len(set(written)) > 1


def test_without_a_tokenizer_images_still_work() -> None:
    image = golden("processors.json")["families"]["qwen3_vl"]["preprocessor_config"]
    for archive in ({}, {"tokenizer.json": b'{"added_tokens": []}'}):
        made = Qwen3VL(
            ModelFiles(
                preprocessor_config=image,
                video_preprocessor_config=VIDEO["video_preprocessor_config"],
                token_ids=QWEN_TOKENS,
                encode=ModelFiles.from_archive(archive).encode,
            )
        )
        assert made.modalities == {"image"}
        assert any("videos are off" in warning for warning in made.warnings)


@pytest.mark.parametrize(
    ("total", "fps", "frames"),
    [
        # torch 2.13: torch.arange(0, total, total / count).int()
        (124, 17.6, [0, 8, 17, 26, 35, 44, 53, 62, 70, 79, 88, 97, 106, 115]),
        (
            *(76, 5.4),
            [
                *(0, 2, 5, 8, 10, 13, 16, 19, 21, 24, 27, 29, 32, 35, 38, 40, 43, 46, 48),
                *(51, 54, 57, 59, 62, 65, 67, 70, 73),
            ],
        ),
        # It has a last one of 17 here, which is behind the video.
        (17, 2.4, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15]),
    ],
)
def test_equal_steps_are_those_of_the_reference_s_arithmetic(
    total: int, fps: float, frames: list[int]
) -> None:
    plan = spec("qwen2_5_vl").plan_video(320, 240, index=0, total_frames=total, fps=fps)
    assert list(plan.frames) == frames


@pytest.mark.parametrize("fps", [10.0, 24.0, 25.0, 29.97, 30.0])
def test_no_frame_lies_behind_the_video(fps: float) -> None:
    made = spec("qwen2_5_vl")
    for total in range(10, 3000, 7):
        frames = made.plan_video(320, 240, index=0, total_frames=total, fps=fps).frames
        assert frames[-1] < total
        assert list(frames) == sorted(set(frames))


def test_qwen2_takes_whole_temporal_patches_in_equal_steps() -> None:
    size = {"shortest_edge": 100352, "longest_edge": 602112}
    plan = spec("qwen2_5_vl", size=size).plan_video(320, 240, index=0, total_frames=90, fps=30.0)
    assert plan.frames == (0, 15, 30, 45, 60, 75)
    assert plan.grid == (3, 20, 28)
    assert plan.feature_tokens == 420
    side = spec("qwen2_5_vl", size=size).side_tensors([plan])
    assert side["second_per_grid_ts"].tolist() == [1.0]
    assert "second_per_grid_ts" not in spec("qwen2_vl", size=size).side_tensors([plan])


def test_a_checkpoints_number_of_frames_counts_until_a_client_wants_a_rate() -> None:
    made = spec(num_frames=6)
    few = made.plan_video(64, 64, index=0, total_frames=3, fps=24.0)
    assert few.frames == (0, 0, 1, 1, 2, 2)
    assert made.plan_video(64, 64, index=0, total_frames=90, fps=30.0).grid[0] == 3
    wanted = made.plan_video(64, 64, index=0, total_frames=90, fps=30.0, sample_fps=3.0)
    assert len(wanted.frames) == 9
    assert wanted.hint == "fps=3.0"


@pytest.mark.parametrize(("number", "frames"), [(6, 6), (5, 4), (7, 8)])
def test_qwen2_rounds_a_number_of_frames_to_whole_temporal_patches(
    number: int, frames: int
) -> None:
    made = spec("qwen2_vl", num_frames=number)
    plan = made.plan_video(320, 240, index=0, total_frames=90, fps=30.0)
    assert plan.frames == tuple(int(i * 90 / frames) for i in range(frames))
    with pytest.raises(Fault, match=f"too short, the model takes at least {number}") as caught:
        made.plan_video(320, 240, index=1, total_frames=3, fps=30.0)
    assert caught.value.reason is Reason.MEDIA_FORMAT_UNSUPPORTED


def test_a_number_of_frames_and_a_rate_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="num_frames and fps exclude each other"):
        spec(num_frames=6, fps=2)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_vl"])
def test_a_video_is_normalised_by_the_settings_of_its_own_processor(model_type: str) -> None:
    other = spec(model_type, image_mean=[0.1, 0.9, 0.3], image_std=[0.7, 0.2, 1.5])
    alike = spec(model_type)
    normalized = FORMATS["float32"]
    frames = np.full((4, 64, 64, 3), 255, np.uint8)
    clip_plan = other.plan_video(64, 64, index=0, total_frames=4, fps=24.0)
    packed = other.pack(clip_plan, frames[: len(clip_plan.frames)], normalized, BACKEND)
    expected = [(1 - 0.1) / 0.7, (1 - 0.9) / 0.2, (1 - 0.3) / 1.5]
    per_channel = packed.reshape(len(packed), 3, -1)
    for channel, value in enumerate(expected):
        assert np.allclose(per_channel[:, channel], value, atol=1e-5)
    picture = other.plan_image(64, 64, index=0)
    pictures = [made.pack(picture, frames[0], normalized, BACKEND) for made in (other, alike)]
    assert np.array_equal(*pictures)


def test_qwen3_videos_know_only_the_newer_spelling_of_their_bounds() -> None:
    made = spec(min_pixels=500_000, max_pixels=600_000)
    assert "video_preprocessor_config.json: min_pixels is not understood and was ignored" in (
        made.warnings
    )
    size = {"total_frames": 4, "fps": 24.0}
    assert made.plan_video(64, 64, index=0, **size) == spec().plan_video(64, 64, index=0, **size)
    # Without bounds of their own they have the reference's: 131,072 pixels at least.
    free = spec(size=None).plan_video(64, 64, index=0, **size)
    assert (free.width, free.height) == (192, 192)


def test_what_one_file_says_of_images_and_videos_is_told_once() -> None:
    image = golden("processors.json")["families"]["qwen2_vl"]["preprocessor_config"]
    made = spec_for(
        "qwen2_vl",
        (),
        ModelFiles(
            preprocessor_config=image | {"gamma": 2},
            video_preprocessor_config=image | {"gamma": 2},
            video_file="preprocessor_config.json",
            token_ids=QWEN_TOKENS,
        ),
    )
    assert made is not None
    assert made.modalities == {"image", "video"}
    assert [w for w in made.warnings if "gamma" in w] == [
        "preprocessor_config.json: gamma is not understood and was ignored"
    ]
