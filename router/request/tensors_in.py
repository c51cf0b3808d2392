"""Tensors that a client made: checked, and given identities of our own.

A worker takes `mm_hashes` on trust as the key of its caches. A client that
chooses them could read another client's pictures, or poison them, so they are
derived from the tensors themselves unless the operator trusts its clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blake3 import blake3

from router.vision.plan import ModelSpec
from router.vision.tensors_check import CheckedMedia, WireLimits, check_mm_inputs
from router.wire import engine

_DOMAIN = b"mmrouter client tensors v1\0"


def adopt_client_tensors(
    request: engine.GenerateRequest, spec: ModelSpec, trust_hashes: bool
) -> CheckedMedia:
    """Checks all batches of a request and replaces their hashes in place.

    Blocks for as long as hashing the pixels takes, without the GIL. Raises
    `Fault` as `check_mm_inputs` does.
    """
    batches = [request.mm_inputs, *request.extra_mm_inputs]
    checked = check_mm_inputs(batches, request.tokenized.input_ids, spec, WireLimits())
    if not trust_hashes:
        for batch, rows in zip(batches, checked.item_rows, strict=True):
            hashes = [_identity(batch, *part) for part in _items(batch, rows)]
            del batch.mm_hashes[:]
            batch.mm_hashes.extend(hashes)
    return checked


def _items(batch: engine.MultimodalInputs, rows: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
    """Each item's position and pixels."""
    payload = memoryview(batch.pixel_values.inline)
    row_bytes = len(payload) // max(1, sum(rows))
    start = 0
    for item, count in enumerate(rows):
        yield item, payload[start : start + count * row_bytes]
        start += count * row_bytes


def _identity(batch: engine.MultimodalInputs, item: int, pixels: memoryview) -> str:
    """Hex blake3 over what makes one item's embeddings: pixels, their form, its small tensors.

    The same picture has the same value wherever it stands in a request.
    """
    digest = blake3(_DOMAIN)
    tensor = batch.pixel_values
    digest.update(f"{batch.modality}:{tensor.dtype}:{list(tensor.shape)[1:]}:".encode())
    for name, side in sorted(batch.model_specific_tensors.items()):
        entry = len(side.inline) // len(batch.mm_placeholders)
        digest.update(f"{name}:{side.dtype}:{entry}:".encode())
        digest.update(memoryview(side.inline)[item * entry : (item + 1) * entry])
    digest.update(pixels)
    return str(digest.hexdigest())
