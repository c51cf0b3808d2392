"""The identity of a media item: what caches and prefix keys know it by.

A worker takes the hash on trust, so two different tensors must never share
one, and one picture should have the same hash wherever it was processed. For a
picture that needs no conversion the value below is the one that vLLM computes
itself, so both ways of processing share a worker's caches.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from router.vision.plan import Modality

_LEAF = b"\x03"


def item_identity(
    modality: Modality,
    encoded: bytes | bytearray | memoryview,
    model_id: str,
    changes: Iterable[str] = (),
) -> str:
    """blake3, 64 hex digits, of an encoded file as a model sees it.

    `changes` names everything else that changes pixels (`ItemPlan.hint`, the
    sampling of a video); empty strings count for nothing. Their order does not
    matter. Hashes large files without the GIL. The framing is that of vLLM's
    multimodal hasher: keys in order, each part behind its length in 8
    little-endian bytes.
    """
    digest = blake3()
    _frame(digest, modality.encode())
    digest.update(_LEAF)
    _frame(digest, modality.encode())
    digest.update(_LEAF)
    _frame(digest, encoded)
    _frame(digest, b"model_id")
    digest.update(_LEAF)
    _frame(digest, model_id.encode())
    for change in sorted(set(changes) - {""}):
        _frame(digest, b"router_change")
        digest.update(_LEAF)
        _frame(digest, change.encode())
    return digest.hexdigest()


def _frame(digest: blake3, part: bytes | bytearray | memoryview) -> None:
    digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
    digest.update(part)
