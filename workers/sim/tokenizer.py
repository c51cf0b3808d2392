"""A byte-level tokenizer: token id 0..255 is that byte, and Qwen's special tokens keep their ids.

It is a real `tokenizers` BPE file with no merges, so any client that loads
tokenizer.json can write prompts for the simulator and read its answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache

import numpy as np
from tokenizers import Tokenizer

SPECIAL_TOKENS: dict[str, int] = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|object_ref_start|>": 151646,
    "<|object_ref_end|>": 151647,
    "<|box_start|>": 151648,
    "<|box_end|>": 151649,
    "<|quad_start|>": 151650,
    "<|quad_end|>": 151651,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}
ENDOFTEXT = SPECIAL_TOKENS["<|endoftext|>"]
IM_START = SPECIAL_TOKENS["<|im_start|>"]
IM_END = SPECIAL_TOKENS["<|im_end|>"]
VISION_START = SPECIAL_TOKENS["<|vision_start|>"]
VISION_END = SPECIAL_TOKENS["<|vision_end|>"]
IMAGE_PAD = SPECIAL_TOKENS["<|image_pad|>"]
VIDEO_PAD = SPECIAL_TOKENS["<|video_pad|>"]
EOS_IDS = (IM_END, ENDOFTEXT)
VOCAB_SIZE = 151_936

_SPECIAL_TEXT = {token_id: text for text, token_id in SPECIAL_TOKENS.items()}


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each of the 256 bytes.

    Printable Latin-1 bytes stand for themselves; the others take the code
    points from 256 on, in order (the GPT-2 convention).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, spare = [], 256
    for byte in range(256):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(spare))
            spare += 1
    return alphabet


@cache
def tokenizer_json() -> str:
    """The text of tokenizer.json."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    vocabulary.update(SPECIAL_TOKENS)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": token_id,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for text, token_id in SPECIAL_TOKENS.items()
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": [],
            },
        },
        ensure_ascii=False,
    )


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json())


def encode(text: str) -> list[int]:
    """Token ids of `text`; special tokens written out become their ids."""
    ids: list[int] = _tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def token_bytes(token_id: int, *, special: bool = True) -> bytes:
    """What one token adds to the text; nothing for special tokens when not `special`."""
    if token_id < 256:
        return bytes((token_id,))
    return _SPECIAL_TEXT.get(token_id, "").encode() if special else b""


def decode(ids: Iterable[int], *, special: bool = True) -> str:
    """The text of `ids`; ids that no token has add nothing."""
    return b"".join(token_bytes(i, special=special) for i in ids).decode(errors="replace")


def plain_bytes(ids: np.ndarray) -> bytes:
    """The bytes of all byte tokens in `ids` (uint32 [n]), special tokens left out."""
    return ids[ids < 256].astype(np.uint8).tobytes()
