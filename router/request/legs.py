"""The two requests that a prefill/decode pair gets in place of one.

Pixels go to the prefill leg only. What the decode leg must have is their
identity: hashes, placeholder ranges and grids. With bare token ids it would
answer for whatever picture it remembers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import quote

from google.protobuf.message import Message

from router.fleet.capability import AGREED, Capability
from router.request.prepared import Body
from router.wire import engine

MOONCAKE = "MooncakeConnector"

# Where a Mooncake prefill worker answers for its transfers unless a label says otherwise.
_BOOTSTRAP_PORT = "8998"
BOOTSTRAP_LABEL = "mooncake_bootstrap_port"

_MEDIA = frozenset({"media_refs", "mm_inputs", "extra_mm_inputs"})


@dataclass(frozen=True)
class Handoff:
    """What a prefill leg left for the decode leg."""

    transfer_params: str
    identity: engine.MediaIdentity | None = None


def prefill_body(body: Body, transfer_id: str) -> Body:
    """The prefill leg's request: one token, and the wish to decode elsewhere.

    `transfer_id` is the router's own, empty for connectors that make theirs.
    The token is thrown away, so the ways of choosing it are left out; and it
    must not end the answer, since a worker hands over only what goes on.
    """
    request = engine.GenerateRequest()
    request.CopyFrom(body.request)
    asked = body.request.sampling_params
    request.sampling_params.Clear()
    params = request.sampling_params
    params.temperature, params.max_tokens, params.n, params.ignore_eos = 0.0, 1, 1, True
    if asked.HasField("truncate_prompt_tokens"):
        params.truncate_prompt_tokens = asked.truncate_prompt_tokens
    request.stream = False
    wish: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
    if transfer_id:
        wish["transfer_id"] = transfer_id
    request.ClearField("kv_transfer_params")
    request.kv_transfer_params_json = json.dumps(wish)
    return Body(request, body.batches)


def decode_body(body: Body, handoff: Handoff) -> Body:
    """The decode leg's request: no pixels, and the identity of every item.

    References are replaced by the identity that the prefill leg returned;
    where it returned none they go along once more.
    """
    whole = body.request
    request = _without_media(whole)
    request.ClearField("kv_transfer_params")
    request.kv_transfer_params_json = handoff.transfer_params
    if not whole.HasField("media_refs"):
        batches = [batch.head for batch in body.batches]
        if not batches and whole.HasField("mm_inputs"):
            batches = [whole.mm_inputs, *whole.extra_mm_inputs]
        for position, batch in enumerate(batches):
            place = request.extra_mm_inputs.add() if position else request.mm_inputs
            place.CopyFrom(_without_pixels(batch))
    elif handoff.identity is not None:
        _put_identity(request, handoff.identity)
    else:
        request.media_refs.CopyFrom(whole.media_refs)
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


def incompatibility(prefill: Capability, decode: Capability) -> str | None:
    """The name of the first thing that keeps two workers from being a pair; None for nothing.

    Both must say the same of their caches, and name the connector. A pairing
    protocol, which not every worker has, must be the same where both have one.
    """
    if not prefill.kv_connector:
        return "kv_connector"
    for name in AGREED:
        if getattr(prefill, name) != getattr(decode, name):
            return name
    ours, theirs = prefill.pairing_protocol, decode.pairing_protocol
    if ours and theirs and ours != theirs:
        return "pairing_protocol"
    if prefill.kv_connector == MOONCAKE and not prefill.kv_engine_id:
        # A decode leg asks for the transfer by it.
        return "kv_engine_id"
    return None


def _without_media(request: engine.GenerateRequest) -> engine.GenerateRequest:
    """A copy without media, whose megabytes are not even touched."""
    copy = engine.GenerateRequest()
    for field, value in request.ListFields():
        if field.name in _MEDIA:
            continue
        if isinstance(value, Message):
            getattr(copy, field.name).CopyFrom(value)
        else:
            setattr(copy, field.name, value)
    return copy


def _without_pixels(inputs: engine.MultimodalInputs) -> engine.MultimodalInputs:
    key = inputs.encoder_input_key or "pixel_values"
    identity = engine.MultimodalInputs(
        modality=inputs.modality,
        mm_placeholders=inputs.mm_placeholders,
        mm_hashes=inputs.mm_hashes,
        batched_keys=[name for name in inputs.batched_keys if name != key],
        flat_keys={name: sizes for name, sizes in inputs.flat_keys.items() if name != key},
        keep_on_cpu_keys=inputs.keep_on_cpu_keys,
    )
    if inputs.HasField("im_token_id"):
        identity.im_token_id = inputs.im_token_id
    for name, tensor in inputs.model_specific_tensors.items():
        identity.model_specific_tensors[name].CopyFrom(tensor)
    return identity


def _put_identity(request: engine.GenerateRequest, identity: engine.MediaIdentity) -> None:
    del request.tokenized.input_ids[:]
    request.tokenized.input_ids.extend(identity.prompt_token_ids)
    # Whatever a worker adds to it: pixels are not for the decode leg.
    request.mm_inputs.CopyFrom(_without_pixels(identity.mm_inputs))
    request.extra_mm_inputs.extend(map(_without_pixels, identity.extra_mm_inputs))
