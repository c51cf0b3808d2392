"""Live against transformers' torchvision processors, on random pictures."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from router.vision.backend.cpu import CpuBackend
from router.vision.models.qwen2_vl import Qwen2VL
from router.vision.plan import PixelFormat
from router.vision.tensors import join
from router.vision.values import from_bfloat16
from tests.vision.families import spec_of
from tests.vision.pictures import golden
from tests.vision.test_video import VIDEO, spec

MISSING = [name for name in ("torch", "torchvision", "transformers") if find_spec(name) is None]
pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
PROCESSORS = golden("processors.json")["families"]
BACKEND = CpuBackend()
FAMILIES = [name for name, entry in PROCESSORS.items() if entry["reference"] == "transformers"]


def pictures(seed: int, number: int, largest: int = 900) -> list[np.ndarray]:
    noise = np.random.default_rng(seed)
    sizes = noise.integers(24, largest, (number, 2))
    return [noise.integers(0, 256, (int(h), int(w), 3), dtype=np.uint8) for h, w in sizes]


def _settings_of(family: str) -> dict[str, Any]:
    return {k: v for k, v in PROCESSORS[family]["preprocessor_config"].items() if v is not None}


def _compare(family: str, settings: dict[str, Any], shown: list[np.ndarray]) -> None:
    import transformers

    processor = getattr(transformers, PROCESSORS[family]["class"])(**settings)
    made = spec_of(family, settings)
    llama = family == "llama4"
    pixel_format = PixelFormat("bfloat16" if llama else "float32", normalized=True)
    for pixels in shown:
        plan = made.plan_image(pixels.shape[1], pixels.shape[0], index=0)
        _, parts = join([made.pack(plan, pixels, pixel_format, BACKEND)])
        ours = from_bfloat16(parts[0]) if llama else parts[0]
        tensor = processor(images=[pixels], return_tensors="pt", input_data_format="channels_last")
        theirs = tensor["pixel_values"].float().numpy()
        assert np.array_equal(ours, theirs), pixels.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_random_pictures_equal_the_processor(family: str) -> None:
    settings = _settings_of(family)
    _compare(family, settings, pictures(3, 12))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2_vl", {"patch_size": 16, "merge_size": 1}),
        ("qwen2_5_vl", {"patch_size": 12, "merge_size": 3, "min_pixels": 9000}),
        ("qwen3_vl", {"size": {"shortest_edge": 40_000, "longest_edge": 490_000}}),
        ("qwen3_vl", {"size": {"shortest_edge": 9, "longest_edge": 9**9}, "max_pixels": 300_000}),
        ("llama4", {"max_patches": 5, "resize_to_max_canvas": True}),
        ("clip_llava15", {"size": {"height": 336, "width": 336}}),
        ("clip_llava15", {"size": {"height": 300, "width": 400}, "crop_size": 280}),
        ("clip_llava15", {"size": 230, "crop_size": {"height": 224, "width": 224}}),
        ("llava_next", {"image_grid_pinpoints": [[336, 336], [672, 1344], [336, 2352]]}),
        ("internvl", {"min_patches": 3, "max_patches": 7}),
        ("gemma3", {"size": {"height": 224, "width": 224}}),
        ("pixtral", {"size": {"longest_edge": 500}, "patch_size": {"height": 14, "width": 14}}),
    ],
)
def test_other_settings_than_the_checkpoints_equal_the_processor(
    family: str, settings: dict[str, Any]
) -> None:
    changed = _settings_of(family) | settings
    changed |= {"image_mean": [0.1, 0.9, 0.33], "image_std": [0.7, 0.21, 1.5]}
    changed |= {"rescale_factor": 1 / 127.5}
    _compare(family, changed, pictures(5, 6))


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_vl"])
@pytest.mark.parametrize("capped", [False, True])
def test_random_clips_equal_the_processor(model_type: str, capped: bool) -> None:
    import torch
    import transformers
    from transformers.video_utils import VideoMetadata

    name = {"qwen3_vl": "Qwen3VLVideoProcessor", "qwen2_vl": "Qwen2VLVideoProcessor"}[model_type]
    settings: dict[str, Any] = {
        **VIDEO["video_preprocessor_config"],
        "patch_size": 16 if model_type == "qwen3_vl" else 14,
        "size": {"shortest_edge": 16384, "longest_edge": 400_000},
        "cap_pixels_per_frame": capped,
        "max_video_tokens": 60,
        "fps": 2,
        "do_sample_frames": True,
    }
    processor = getattr(transformers, name)(**settings)
    made = spec(model_type, **settings)
    assert isinstance(made, Qwen2VL)
    raw = PixelFormat("uint8", normalized=False)
    noise = np.random.default_rng(8)
    for _ in range(8):
        total, height, width = (int(v) for v in noise.integers((8, 40, 40), (80, 300, 300)))
        rate = float(noise.choice([10.0, 24.0, 29.97]))
        frames = noise.integers(0, 256, (total, height, width, 3), dtype=np.uint8)
        plan = made.plan_video(width, height, index=0, total_frames=total, fps=rate)
        ours = made.pack(plan, frames[list(plan.frames)], raw, BACKEND)
        result = processor(
            videos=[torch.from_numpy(frames.transpose(0, 3, 1, 2).copy())],
            video_metadata=[VideoMetadata(total_num_frames=total, fps=rate)],
            do_rescale=False,
            do_normalize=False,
            return_tensors="pt",
        )
        assert result["video_grid_thw"].tolist() == [list(plan.grid)], (total, rate)
        assert np.array_equal(ours, result["pixel_values_videos"].numpy()), (total, height, width)
