"""Tensors that a client made: checked, and given identities of our own.

A worker takes `mm_hashes` on trust as the key of its caches. A client that
chooses them could read another client's pictures, or poison them, so they are
derived from the tensors themselves unless the operator trusts its clients.
"""

from __future__ import annotations

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
        for batch in batches:
            identity = _identity(batch)
            items = len(batch.mm_hashes)
            del batch.mm_hashes[:]
            batch.mm_hashes.extend(f"{identity}-{item}" for item in range(items))
    return checked


def _identity(batch: engine.MultimodalInputs) -> str:
    """Hex blake3 over what makes the embeddings: dtype, shapes, small tensors and pixels."""
    digest = blake3(_DOMAIN)
    for name, tensor in sorted(batch.model_specific_tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}:".encode())
        digest.update(tensor.inline)
    tensor = batch.pixel_values
    digest.update(f"{batch.modality}:{tensor.dtype}:{list(tensor.shape)}:".encode())
    digest.update(tensor.inline)
    return str(digest.hexdigest())
