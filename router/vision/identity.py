"""Who a media item is, for every cache that keys by content.

The hashes sent with tensors become the worker's own identifiers. For a file
that reaches the model unchanged the worker's own rule is used, so that tensors
from the router and references to the worker share one encoder and prefix cache.
"""

from __future__ import annotations

from blake3 import blake3

_LEAF = b"\x03"


def media_identity(modality: str, data: bytes, model_id: str, *, shaped_by: str = "") -> str:
    """Hex blake3 of one media item, 64 digits; blocks, without the GIL for large files.

    vLLM's own identifier (`vllm/multimodal/hasher.py`) of an encoded file that
    the worker would take as it is: keyword arguments in order, keys and values
    framed by their 8-byte little-endian length, values tagged as leaves.
    `model_id` is the worker's model path. `shaped_by` names wishes that change
    the pixels; with one, the value is another and no worker shares it.
    """
    digest = blake3()
    digest.update(_frame(modality.encode()) + _LEAF)
    digest.update(_frame(modality.encode()) + _LEAF)
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
    digest.update(_frame(b"model_id") + _LEAF + _frame(model_id.encode()))
    if shaped_by:
        digest.update(_frame(b"mmrouter") + _LEAF + _frame(shaped_by.encode()))
    return str(digest.hexdigest())


def _frame(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value
