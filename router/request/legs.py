"""The two requests that a prefill/decode pair gets in place of one.

Pixels go to the prefill leg only. What the decode leg must have is their
identity: hashes, placeholder ranges and grids. With bare token ids it would
answer for whatever picture it remembers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from router.faults import Fault, Reason
from router.fleet.capability import Capability
from router.request.prepared import Body
from router.wire import engine

NIXL, MOONCAKE = "NixlConnector", "MooncakeConnector"

# Where a Mooncake prefill worker answers for its transfers unless a label says otherwise.
_BOOTSTRAP_PORT = "8998"
BOOTSTRAP_LABEL = "mooncake_bootstrap_port"


@dataclass(frozen=True)
class Handoff:
    """What a prefill leg left for the decode leg."""

    transfer_params: str
    identity: engine.MediaIdentity | None = None


def prefill_body(body: Body, transfer_id: str) -> Body:
    """The prefill leg's request: one token, one choice, and the wish to decode elsewhere.

    `transfer_id` is the router's own, empty for connectors that make theirs.
    """
    request = engine.GenerateRequest()
    request.CopyFrom(body.request)
    params = request.sampling_params
    params.max_tokens = 1
    params.min_tokens = min(params.min_tokens, 1)
    params.n = 1
    request.stream = False
    wish: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
    if transfer_id:
        wish["transfer_id"] = transfer_id
    request.kv_transfer_params_json = json.dumps(wish)
    return Body(request, body.batches)


def decode_body(body: Body, handoff: Handoff, *, refetch: bool) -> Body:
    """The decode leg's request: no pixels, and the identity of every item.

    References are replaced by the identity that the prefill leg returned.
    Where it returned none they go along once more if `refetch` is set, else
    `Fault` LEG_FAILED is raised.
    """
    request = engine.GenerateRequest()
    request.CopyFrom(body.request)
    request.kv_transfer_params_json = handoff.transfer_params
    if request.HasField("media_refs"):
        if handoff.identity is not None:
            _put_identity(request, handoff.identity)
        elif not refetch:
            raise Fault(
                Reason.LEG_FAILED,
                "the prefill worker returned no identity of the media",
                metadata={"leg": "prefill", "cause": "no_media_identity"},
            )
        return Body(request)
    _put_batches(request, (batch.head for batch in body.batches))
    for inputs in (request.mm_inputs, *request.extra_mm_inputs):
        _drop_pixels(inputs)
    if not body.batches and not body.request.HasField("mm_inputs"):
        request.ClearField("mm_inputs")
    return Body(request)


def mooncake_handoff(worker: str, port: str | None, engine_id: str, transfer_id: str) -> Handoff:
    """What a decode leg needs to fetch from a Mooncake prefill leg, known beforehand.

    `worker` is the prefill worker's HOST:PORT, `port` that of its transfers.
    """
    host = quote(worker.rpartition(":")[0], safe="[]:.")
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": f"http://{host}:{port or _BOOTSTRAP_PORT}",
    }
    return Handoff(json.dumps(params))


def _put_batches(request: engine.GenerateRequest, heads: Iterable[engine.MultimodalInputs]) -> None:
    for position, head in enumerate(heads):
        (request.extra_mm_inputs.add() if position else request.mm_inputs).CopyFrom(head)


def _put_identity(request: engine.GenerateRequest, identity: engine.MediaIdentity) -> None:
    request.ClearField("media_refs")
    del request.tokenized.input_ids[:]
    request.tokenized.input_ids.extend(identity.prompt_token_ids)
    if identity.HasField("mm_inputs"):
        request.mm_inputs.CopyFrom(identity.mm_inputs)
    request.extra_mm_inputs.extend(identity.extra_mm_inputs)


def _drop_pixels(inputs: engine.MultimodalInputs) -> None:
    key = inputs.encoder_input_key or "pixel_values"
    inputs.ClearField("pixel_values")
    inputs.ClearField("encoder_input_key")
    inputs.flat_keys.pop(key, None)
    kept = [name for name in inputs.batched_keys if name != key]
    del inputs.batched_keys[:]
    inputs.batched_keys.extend(kept)


def incompatibility(prefill: Capability, decode: Capability) -> str | None:
    """The name of the first thing that two workers of a pair must have alike and have not.

    What one of them does not say is no difference.
    """
    for name in (
        "kv_connector",
        "kv_cache_dtype",
        "block_size",
        "attention_backend",
        "model_dtype",
        "pairing_protocol",
    ):
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours and theirs and ours != theirs:
            return name
    return None
