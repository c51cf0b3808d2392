"""The files that the worker serves about its model, and the zip that carries them."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace

from router.wire import common
from workers.sim.options import SimOptions
from workers.sim.tokenizer import (
    EOS_IDS,
    IMAGE_PAD,
    SPECIAL_TOKENS,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    VOCAB_SIZE,
    tokenizer_json,
)

CHUNK_BYTES = 64 * 1024

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type in ('image', 'image_url') or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type in ('video', 'video_url') or 'video' in part or 'video_url' in part %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Family:
    """What tells the Qwen vision families apart, as their checkpoints publish it."""

    architecture: str
    image_processor: str
    video_processor: str
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    min_pixels: int
    max_pixels: int
    video_min_pixels: int
    video_max_pixels: int

    @property
    def pixel_width(self) -> int:
        """Values per patch: channels x temporal x patch x patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2


_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)

FAMILIES: dict[str, Family] = {
    "qwen3_vl": Family(
        architecture="Qwen3VLForConditionalGeneration",
        image_processor="Qwen2VLImageProcessorFast",
        video_processor="Qwen3VLVideoProcessor",
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        mean=_HALF,
        std=_HALF,
        min_pixels=65_536,
        max_pixels=16_777_216,
        video_min_pixels=4_096,
        video_max_pixels=25_165_824,
    ),
    "qwen2_5_vl": Family(
        architecture="Qwen2_5_VLForConditionalGeneration",
        image_processor="Qwen2VLImageProcessor",
        video_processor="Qwen2VLVideoProcessor",
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        mean=_CLIP_MEAN,
        std=_CLIP_STD,
        min_pixels=3_136,
        max_pixels=12_845_056,
        video_min_pixels=3_136,
        video_max_pixels=12_845_056,
    ),
}
# The same sizes and normalisation under another name.
FAMILIES["qwen2_vl"] = replace(
    FAMILIES["qwen2_5_vl"], architecture="Qwen2VLForConditionalGeneration"
)


def family_of(options: SimOptions) -> Family | None:
    """The vision family of the model, None for a text model."""
    return FAMILIES.get(options.model_type)


def architectures(options: SimOptions) -> list[str]:
    family = family_of(options)
    if family is not None:
        return [family.architecture]
    words = options.model_type.replace("-", "_").split("_")
    return ["".join(word.capitalize() for word in words) + "ForCausalLM"]


def model_files(options: SimOptions) -> dict[str, bytes]:
    """File name -> content, as a checkpoint's directory would hold them."""
    family = family_of(options)
    documents: dict[str, object] = {
        "tokenizer_config.json": _tokenizer_config(),
        "config.json": _config(options, family),
        "generation_config.json": {
            "do_sample": False,
            "temperature": 0.0,
            "eos_token_id": list(EOS_IDS),
            "pad_token_id": SPECIAL_TOKENS["<|endoftext|>"],
        },
    }
    if family is not None:
        documents["preprocessor_config.json"] = _image_processor(options, family)
        documents["video_preprocessor_config.json"] = _video_processor(family)
    files = {name: json.dumps(document, indent=2).encode() for name, document in documents.items()}
    files["tokenizer.json"] = tokenizer_json().encode()
    files["chat_template.jinja"] = CHAT_TEMPLATE.encode()
    return files


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {
            str(token_id): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for text, token_id in SPECIAL_TOKENS.items()
        },
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 262_144,
        "chat_template": CHAT_TEMPLATE,
    }


def _config(options: SimOptions, family: Family | None) -> dict[str, object]:
    common_part: dict[str, object] = {
        "architectures": architectures(options),
        "model_type": options.model_type,
        "torch_dtype": options.model_dtype,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": options.max_context,
        "eos_token_id": EOS_IDS[0],
    }
    if family is None:
        return common_part
    return common_part | {
        "image_token_id": IMAGE_PAD,
        "video_token_id": VIDEO_PAD,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "vision_config": {
            "model_type": options.model_type,
            "patch_size": family.patch_size,
            "spatial_merge_size": family.merge_size,
            "temporal_patch_size": family.temporal_patch_size,
            "in_channels": 3,
        },
        "text_config": {
            "model_type": f"{options.model_type}_text",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": options.max_context,
            "dtype": options.model_dtype,
        },
    }


def _image_processor(options: SimOptions, family: Family) -> dict[str, object]:
    return {
        "image_processor_type": family.image_processor,
        "size": {
            "shortest_edge": options.min_pixels or family.min_pixels,
            "longest_edge": options.max_pixels or family.max_pixels,
        },
        **_processor_common(family),
    }


def _video_processor(family: Family) -> dict[str, object]:
    return {
        "video_processor_type": family.video_processor,
        "size": {
            "shortest_edge": family.video_min_pixels,
            "longest_edge": family.video_max_pixels,
        },
        "fps": 2,
        "min_frames": 4,
        "max_frames": 768,
        "do_sample_frames": True,
        **_processor_common(family),
    }


def _processor_common(family: Family) -> dict[str, object]:
    return {
        "patch_size": family.patch_size,
        "temporal_patch_size": family.temporal_patch_size,
        "merge_size": family.merge_size,
        "image_mean": list(family.mean),
        "image_std": list(family.std),
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
    }


def pack(files: dict[str, bytes]) -> bytes:
    """A zip of `files`, the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name])
    return buffer.getvalue()


def chunks(archive: bytes, size: int = CHUNK_BYTES) -> Iterator[common.GetTokenizerChunk]:
    """The archive in slices; the last one alone carries the SHA-256 of the whole."""
    for start in range(0, len(archive), size):
        last = start + size >= len(archive)
        yield common.GetTokenizerChunk(
            data=archive[start : start + size],
            sha256=hashlib.sha256(archive).hexdigest() if last else "",
        )
