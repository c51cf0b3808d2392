"""Makes a Qwen3-VL small enough for a test: random weights, a tokenizer of its own.

    python make_model.py DIRECTORY

Its answers mean nothing, but at temperature 0 they are always the same and
depend on every token and every pixel, so that two ways of asking the same can
be compared id by id. Nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

VOCABULARY = 2016
# In the order of the real model.
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# How the real tokenizer cuts text into words before merging.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' or part.type == 'image_url' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' or part.type == 'video_url' %}
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
PROCESSOR = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}
# Small sizes, for a test's sake; the real model has 16 times as many pixels.
IMAGES = PROCESSOR | {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65_536, "longest_edge": 1_048_576},
}
VIDEOS = PROCESSOR | {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4_096, "longest_edge": 2_097_152},
}


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer in Qwen's manner, trained on the standard library's text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    library = Path(sysconfig.get_path("stdlib"))
    sources = [library / "pydoc_data" / "topics.py", *sorted(library.glob("[a-e]*.py"))[:20]]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    texts = (path.read_text("utf-8", errors="ignore")[:200_000] for path in sources)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> dict[str, int]:
    """Writes every file that a Qwen tokenizer and processor are read from; returns special ids."""
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    tokenizer.save(str(out / "tokenizer.json"))
    bpe = json.loads(tokenizer.to_str())["model"]
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"])
    (out / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{m}\n" for m in merges), "utf-8")
    _write(out / "vocab.json", bpe["vocab"])
    (out / "chat_template.jinja").write_text(TEMPLATE)
    _write(out / "chat_template.json", {"chat_template": TEMPLATE})
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    _write(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "processor_class": "Qwen3VLProcessor",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": False,
            "errors": "replace",
            "model_max_length": 262_144,
            "chat_template": TEMPLATE,
            "additional_special_tokens": list(SPECIAL[1:]),
            "added_tokens_decoder": {
                str(ids[token]): {"content": token, "special": True} | flags for token in SPECIAL
            },
        },
    )
    _write(out / "preprocessor_config.json", IMAGES)
    _write(out / "video_preprocessor_config.json", VIDEOS)
    return ids


def write_model(ids: dict[str, int], vocabulary: int, out: Path) -> None:
    """Writes weights and config. Two layers each for text and pictures, 64 wide."""
    torch.manual_seed(7)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": -(-vocabulary // 64) * 64,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5_000_000.0,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        # Wider than a model is initialised with: otherwise one token wins always.
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                spread = 0.6 if "lm_head" in name else 0.25
                noise = torch.randn(weight.shape, generator=random) * spread
                weight.copy_(noise.to(weight.dtype))
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = ends[1]
    model.config.text_config.eos_token_id = ends[0]
    model.config.text_config.pad_token_id = ends[1]
    model.save_pretrained(out)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), "utf-8")


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    ids = write_tokenizer(tokenizer, out)
    write_model(ids, tokenizer.get_vocab_size(), out)
    # What a worker will load; an error is better seen here than in its log.
    processor = AutoProcessor.from_pretrained(out)
    assert processor.tokenizer.encode("<|image_pad|>") == [ids["<|image_pad|>"]]
    text = "Hello, wörld! 123\n"
    assert processor.tokenizer.decode(processor.tokenizer.encode(text)) == text


if __name__ == "__main__":
    main()
