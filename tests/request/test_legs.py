"""What the two legs of a pair are sent: never pixels twice, never a bare picture."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from router.fleet.capability import Capability
from router.request.legs import (
    Handoff,
    decode_body,
    incompatibility,
    mooncake_handoff,
    prefill_body,
)
from router.request.prepared import Body
from router.vision.tensors import Batch
from router.wire import common, engine

PARAMS = '{"do_remote_prefill": true, "anything": ["as", "it", "came"]}'


def tensors(*hashes: str, pixels: bytes = b"pixels" * 1000) -> engine.MultimodalInputs:
    """One image batch as a client or the router makes it."""
    inputs = engine.MultimodalInputs(
        modality=common.IMAGE,
        im_token_id=7,
        mm_hashes=hashes,
        batched_keys=["image_grid_thw", "patches_per_image"],
        flat_keys={"pixel_values": "patches_per_image"},
        keep_on_cpu_keys=["image_grid_thw"],
    )
    inputs.pixel_values.shape.extend([len(hashes), len(pixels)])
    inputs.pixel_values.dtype = "uint8"
    if pixels:
        inputs.pixel_values.inline = pixels
    for at, _ in enumerate(hashes):
        inputs.mm_placeholders.add(offset=1 + 4 * at, length=4)
    grid = np.tile([1, 4, 4], (len(hashes), 1)).astype("<i8")
    inputs.model_specific_tensors["image_grid_thw"].CopyFrom(
        engine.TensorData(shape=grid.shape, dtype="int64", inline=grid.tobytes())
    )
    return inputs


def tokens(**fields: Any) -> engine.GenerateRequest:
    return engine.GenerateRequest(
        tokenized=engine.TokenizedInput(input_ids=[5, 7, 7, 7, 7, 6]), **fields
    )


def referring(*urls: str) -> engine.GenerateRequest:
    request = engine.GenerateRequest(tokenized=engine.TokenizedInput(input_ids=[5, 7, 6]))
    for url in urls:
        request.media_refs.items.add(modality=common.IMAGE, url=url)
    return request


def identity(*hashes: str, length: int = 4, total: int | None = None) -> engine.MediaIdentity:
    expanded = 2 + 4 * len(hashes) if total is None else total
    told = engine.MediaIdentity(prompt_token_ids=[7] * expanded)
    for at, name in enumerate(hashes):
        told.mm_inputs.mm_hashes.append(name)
        told.mm_inputs.mm_placeholders.add(offset=1 + 4 * at, length=length)
    return told


# -- Prefill


def test_the_prefill_leg_computes_one_token_and_decodes_elsewhere() -> None:
    asked = engine.SamplingParams(
        n=4, max_tokens=100, min_tokens=9, logprobs=5, stop=["."], stop_token_ids=[3], regex="a+"
    )
    request = tokens(stream=True, sampling_params=asked)
    leg = prefill_body(Body(request), "").request
    assert leg.sampling_params == engine.SamplingParams(
        temperature=0, max_tokens=1, n=1, ignore_eos=True
    )
    assert not leg.stream
    assert json.loads(leg.kv_transfer_params_json) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }
    assert list(leg.tokenized.input_ids) == list(request.tokenized.input_ids)
    assert request == tokens(stream=True, sampling_params=asked)


def test_both_legs_cut_the_prompt_alike() -> None:
    request = tokens(sampling_params=engine.SamplingParams(truncate_prompt_tokens=3))
    for leg in (prefill_body(Body(request), ""), decode_body(Body(request), Handoff(PARAMS))):
        assert leg.request.sampling_params.truncate_prompt_tokens == 3


def test_a_minted_transfer_id_reaches_the_prefill_leg() -> None:
    leg = prefill_body(Body(tokens()), "xfer-1").request
    assert json.loads(leg.kv_transfer_params_json)["transfer_id"] == "xfer-1"


def test_nothing_of_a_clients_own_transfer_reaches_either_leg() -> None:
    request = tokens(kv_transfer_params_json='{"remote_host": "10.0.0.9"}')
    request.kv_transfer_params.remote_host = "10.0.0.9"
    for leg in (prefill_body(Body(request), ""), decode_body(Body(request), Handoff(PARAMS))):
        assert b"10.0.0.9" not in leg.wire("id")


def test_the_prefill_leg_has_the_pixels() -> None:
    for body in (
        Body(tokens(mm_inputs=tensors("a"))),
        Body(tokens(), [Batch(tensors("a", pixels=b""), (np.ones((1, 6000), np.uint8),))]),
    ):
        sent = engine.GenerateRequest.FromString(prefill_body(body, "").wire("id"))
        assert len(sent.mm_inputs.pixel_values.inline) == 6000


# -- Decode


def test_the_decode_leg_is_asked_what_the_client_asked() -> None:
    asked = engine.SamplingParams(n=4, max_tokens=100, logprobs=5, stop=["."], seed=1)
    leg = decode_body(Body(tokens(stream=True, sampling_params=asked)), Handoff(PARAMS)).request
    assert leg == tokens(stream=True, sampling_params=asked, kv_transfer_params_json=PARAMS)


@pytest.mark.parametrize("made_by", ["client", "router"])
def test_the_decode_leg_has_identity_and_no_pixels(made_by: str) -> None:
    if made_by == "client":
        request = tokens(mm_inputs=tensors("a"), extra_mm_inputs=[tensors("b")])
        body = Body(request)
    else:
        pixels = (np.ones((1, 6000), np.uint8),)
        heads = [tensors("a", pixels=b""), tensors("b", pixels=b"")]
        body = Body(tokens(), [Batch(head, pixels) for head in heads])
    before = body.request.SerializeToString(deterministic=True)
    leg = decode_body(body, Handoff(PARAMS))
    assert not leg.batches
    assert len(leg.wire("id")) < 1000
    assert len(leg.request.extra_mm_inputs) == 1
    for batch, name in zip(
        (leg.request.mm_inputs, *leg.request.extra_mm_inputs), "ab", strict=True
    ):
        whole = tensors(name)
        assert not batch.HasField("pixel_values")
        assert not batch.flat_keys
        assert list(batch.mm_hashes) == [name]
        assert batch.mm_placeholders == whole.mm_placeholders
        assert (
            batch.model_specific_tensors["image_grid_thw"]
            == (whole.model_specific_tensors["image_grid_thw"])
        )
        assert (batch.modality, batch.im_token_id) == (common.IMAGE, 7)
        assert list(batch.keep_on_cpu_keys) == ["image_grid_thw"]
    assert body.request.SerializeToString(deterministic=True) == before


def test_pixels_under_another_name_are_left_out_too() -> None:
    inputs = tensors("a")
    inputs.encoder_input_key = "images"
    inputs.flat_keys.clear()
    inputs.batched_keys.append("images")
    leg = decode_body(Body(tokens(mm_inputs=inputs)), Handoff(PARAMS)).request
    assert list(leg.mm_inputs.batched_keys) == ["image_grid_thw", "patches_per_image"]
    assert not leg.mm_inputs.HasField("encoder_input_key")


def test_an_identity_stands_in_for_references() -> None:
    told = identity("a", "b")
    told.extra_mm_inputs.add(mm_hashes=["c"])
    leg = decode_body(Body(referring("http://h/a", "http://h/b")), Handoff(PARAMS, told)).request
    assert not leg.HasField("media_refs")
    assert list(leg.tokenized.input_ids) == list(told.prompt_token_ids)
    assert leg.mm_inputs == told.mm_inputs
    assert list(leg.extra_mm_inputs) == list(told.extra_mm_inputs)


def test_pixels_in_an_identity_stay_behind() -> None:
    told = engine.MediaIdentity(prompt_token_ids=[5, 7, 7, 7, 7, 6], mm_inputs=tensors("a"))
    told.extra_mm_inputs.append(tensors("b"))
    leg = decode_body(Body(referring("http://h/a")), Handoff(PARAMS, told)).request
    for batch in (leg.mm_inputs, *leg.extra_mm_inputs):
        assert not batch.HasField("pixel_values")
        assert not batch.flat_keys
        assert list(batch.model_specific_tensors) == ["image_grid_thw"]


def test_references_without_an_identity_go_along_again() -> None:
    request = referring("http://h/a")
    leg = decode_body(Body(request), Handoff(PARAMS)).request
    assert leg.media_refs == request.media_refs
    assert list(leg.tokenized.input_ids) == [5, 7, 6]


def test_a_text_stays_a_text() -> None:
    leg = decode_body(Body(engine.GenerateRequest(text="hello")), Handoff(PARAMS)).request
    assert leg == engine.GenerateRequest(text="hello", kv_transfer_params_json=PARAMS)


# -- Mooncake


@pytest.mark.parametrize(
    ("worker", "port", "expected"),
    [
        ("10.0.0.1:50051", None, "http://10.0.0.1:8998"),
        ("10.0.0.1:50051", "9000", "http://10.0.0.1:9000"),
        ("[fd00::1]:50051", None, "http://[fd00::1]:8998"),
        ("prefill-0.vllm:50051", "9000", "http://prefill-0.vllm:9000"),
    ],
)
def test_a_mooncake_decode_leg_is_told_where_to_fetch(
    worker: str, port: str | None, expected: str
) -> None:
    params = json.loads(mooncake_handoff(worker, port, "engine", "xfer-1").transfer_params)
    assert params == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": "xfer-1",
        "remote_engine_id": "engine",
        "remote_bootstrap_addr": expected,
    }


# -- Who may be a pair


def capability(**server: Any) -> Capability:
    reported = {
        "kv_connector": "NixlConnector",
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "attention_backend": "FLASH_ATTN",
        "model_dtype": "bfloat16",
        **server,
    }
    return Capability.from_info(
        engine.GetModelInfoResponse(model_path="m"), engine.GetServerInfoResponse(**reported)
    )


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("kv_connector", "MooncakeConnector"),
        ("kv_connector", ""),
        ("kv_cache_dtype", "fp8"),
        ("kv_cache_dtype", ""),
        ("block_size", 128),
        ("block_size", 0),
        ("attention_backend", "FLASHINFER"),
        ("model_dtype", "float16"),
    ],
)
def test_what_two_workers_of_a_pair_must_have_alike(name: str, other: Any) -> None:
    assert incompatibility(capability(), capability(**{name: other})) == name
    assert incompatibility(capability(**{name: other}), capability()) == name


def test_alike_workers_are_a_pair() -> None:
    assert incompatibility(capability(), capability(model_dtype="torch.bfloat16")) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "cause"),
    [("", "", None), ("2", "", None), ("", "2", None), ("2", "2", None), ("1", "2", "fails")],
)
def test_pairing_protocols_count_where_both_have_one(
    ours: str, theirs: str, cause: str | None
) -> None:
    found = incompatibility(capability(pairing_protocol=ours), capability(pairing_protocol=theirs))
    assert found == (cause and "pairing_protocol")


def test_workers_that_name_no_connector_hand_nothing_over() -> None:
    silent = capability(kv_connector="")
    assert incompatibility(silent, silent) == "kv_connector"


def test_a_mooncake_prefill_worker_needs_a_name() -> None:
    mooncake = {"kv_connector": "MooncakeConnector"}
    assert incompatibility(capability(**mooncake), capability(**mooncake)) == "kv_engine_id"
    named = capability(kv_engine_id="e", **mooncake)
    assert incompatibility(named, capability(**mooncake)) is None
