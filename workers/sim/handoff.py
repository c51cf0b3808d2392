"""From a prefill worker to a decode worker, as vLLM's connectors word it.

NIXL: the prefill's Complete carries a JSON object that the decode request
carries on as it is. A real decode worker pulls the cache by what the object
names; here the object itself holds what a transfer would bring. Mooncake: both
requests carry an id that their sender made up, and the decode worker fetches
the transfer of that id from the prefill worker's bootstrap endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
from blake3 import blake3

from router.wire import common, engine
from workers.sim.kvcache import Placed
from workers.sim.options import SimOptions
from workers.sim.picture import Grid, Sight
from workers.sim.prompt import PAD_IDS, Ids, Prompt
from workers.sim.refused import invalid

MOONCAKE = "MooncakeConnector"

_MODALITIES = {"image": common.IMAGE, "video": common.VIDEO}
# Our own key among the connector's: what a transfer of the cache would carry.
_TRANSFER = "sim_transfer"


@dataclass(frozen=True)
class Outgoing:
    """The request prefills for a decode worker elsewhere; `transfer_id` is Mooncake's."""

    transfer_id: str = ""


@dataclass(frozen=True)
class Incoming:
    """The request goes on from a prefill elsewhere.

    `sights` are what its encoder saw, by identifier; `prompt` is the digest of
    the expanded ids whose cache is handed over.
    """

    sights: Mapping[str, Sight]
    prompt: str


@dataclass(frozen=True)
class Remote:
    """Where an `Incoming` is to be fetched."""

    transfer_id: str
    engine_id: str
    bootstrap: str


Handoff = Outgoing | Incoming | Remote


def read(request: engine.GenerateRequest, options: SimOptions) -> Handoff | None:
    """What the request's kv_transfer_params_json asks for; None without a connector.

    Refused with INVALID_ARGUMENT when it is not an object that the connector
    understands.
    """
    if not options.kv_connector or not request.HasField("kv_transfer_params_json"):
        return None
    try:
        params = json.loads(request.kv_transfer_params_json)
    except ValueError as error:
        raise invalid("kv_transfer_params_json is not JSON") from error
    if not isinstance(params, dict):
        raise invalid("kv_transfer_params_json is not a JSON object")
    if not (params.get("do_remote_decode") or params.get("do_remote_prefill")):
        return None
    return _mooncake(params) if options.kv_connector == MOONCAKE else _nixl(params)


def _nixl(params: Mapping[str, Any]) -> Handoff:
    if params.get("do_remote_decode"):
        return Outgoing()
    if not params.get("remote_engine_id") or not params.get("remote_request_id"):
        raise invalid("kv_transfer_params_json names no remote engine and request")
    return unpack(params.get(_TRANSFER))


def _mooncake(params: Mapping[str, Any]) -> Handoff:
    def named(name: str) -> str:
        value = params.get(name)
        if not isinstance(value, str) or not value:
            raise invalid(f"kv_transfer_params_json has no {name}")
        return value

    transfer_id = named("transfer_id")
    if params.get("do_remote_decode"):
        return Outgoing(transfer_id)
    bootstrap = named("remote_bootstrap_addr")
    if not bootstrap.startswith("http://"):
        raise invalid("remote_bootstrap_addr is not http://HOST:PORT")
    return Remote(transfer_id, named("remote_engine_id"), bootstrap)


def digest(ids: Ids) -> str:
    """Names the expanded prompt `ids` (uint32 [n])."""
    return blake3(np.ascontiguousarray(ids, dtype="<u4").tobytes()).hexdigest()


def pack(prompt: Prompt) -> dict[str, Any]:
    """What a transfer of the prompt's cache would carry, for JSON."""
    sights = {
        placed.identifier: asdict(seen.sight)
        for placed, seen in zip(prompt.placed, prompt.seen, strict=True)
    }
    return {"prompt": digest(prompt.ids), "sights": sights}


def unpack(transfer: Any) -> Incoming:
    """The other side of `pack`. Refused with INVALID_ARGUMENT for anything else."""
    try:
        return Incoming(_sights(transfer["sights"]), str(transfer["prompt"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise invalid("the transfer comes from no simulated worker") from error


def fill(
    complete: engine.GenerateComplete,
    request: engine.GenerateRequest,
    prompt: Prompt,
    options: SimOptions,
) -> None:
    """Puts into a prefill's Complete what its decode worker needs.

    As in a real worker that is nothing where the answer has ended already.
    """
    if complete.finish_reason != "length":
        return
    if options.kv_connector != MOONCAKE:
        complete.kv_transfer_params_json = json.dumps(
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": options.kv_engine_id or "sim",
                "remote_request_id": request.request_id,
                "remote_block_ids": list(range(-(-len(prompt.ids) // options.block_size))),
                "remote_host": "127.0.0.1",
                "remote_port": 0,
                "tp_size": 1,
                _TRANSFER: pack(prompt),
            }
        )
    if request.HasField("media_refs") and options.media_identity:
        complete.media_identity.CopyFrom(_identity(prompt))


def _sights(objects: Mapping[str, Any]) -> dict[str, Sight]:
    sights = {}
    for identifier, fields in objects.items():
        t, rows, columns = fields["grid"]
        red, green, blue = fields["colour"]
        rest = {name: value for name, value in fields.items() if name not in ("grid", "colour")}
        sights[identifier] = Sight(
            grid=(int(t), int(rows), int(columns)),
            colour=(int(red), int(green), int(blue)),
            **rest,
        )
    return sights


def _identity(prompt: Prompt) -> engine.MediaIdentity:
    """Expanded ids, hashes, placeholders and grids; no pixels."""
    identity = engine.MediaIdentity(prompt_token_ids=prompt.ids.tolist())
    by_modality: dict[str, list[tuple[Placed, Grid]]] = {}
    for placed, seen in zip(prompt.placed, prompt.seen, strict=True):
        by_modality.setdefault(seen.sight.modality, []).append((placed, seen.sight.grid))
    for at, (modality, items) in enumerate(by_modality.items()):
        batch = identity.extra_mm_inputs.add() if at else identity.mm_inputs
        batch.modality = _MODALITIES[modality]
        batch.im_token_id = PAD_IDS[modality]
        for placed, _ in items:
            batch.mm_hashes.append(placed.identifier)
            batch.mm_placeholders.add(offset=placed.offset, length=placed.length)
        grids = np.array([grid for _, grid in items], "<i8")
        sizes = np.array([prod(grid) for _, grid in items], "<i8")
        for name, values in ((f"{modality}_grid_thw", grids), (f"patches_per_{modality}", sizes)):
            batch.model_specific_tensors[name].CopyFrom(
                engine.TensorData(shape=values.shape, dtype="int64", inline=values.tobytes())
            )
            batch.batched_keys.append(name)
        batch.keep_on_cpu_keys.append(f"{modality}_grid_thw")
    return identity
