"""Prefill here, decode there: what the connector's object and the media identity carry."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from router.wire import engine
from tests.workers.sim.client import (
    PICTURE,
    Client,
    client_of,
    data_url,
    prompt,
    referring,
    with_tensors,
)
from workers.sim import SimOptions
from workers.sim.tokenizer import decode

PHOTO = "photo_640x480.jpg"
ASK = PICTURE + "Describe it"
REMOTE_DECODE = json.dumps({"do_remote_decode": True, "do_remote_prefill": False})


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Client, Client]]:
    connector = {"kv_connector": "NixlConnector"}
    prefill = SimOptions(kv_role="kv_producer", kv_engine_id="p", **connector)
    decoding = SimOptions(kv_role="kv_consumer", kv_engine_id="d", **connector)
    async with client_of(prefill) as first, client_of(decoding) as second:
        yield first, second


async def prefilled(client: Client, request: engine.GenerateRequest) -> engine.GenerateComplete:
    request.kv_transfer_params_json = REMOTE_DECODE
    request.sampling_params.max_tokens = 1
    (response,) = await client.generate(request)
    return response.complete


def going_on(
    complete: engine.GenerateComplete, request: engine.GenerateRequest
) -> engine.GenerateRequest:
    """The decode leg: the connector's object as it came, identity in place of media."""
    leg = engine.GenerateRequest(request_id="decode")
    leg.kv_transfer_params_json = complete.kv_transfer_params_json
    if complete.HasField("media_identity"):
        leg.tokenized.input_ids.extend(complete.media_identity.prompt_token_ids)
        leg.mm_inputs.CopyFrom(complete.media_identity.mm_inputs)
    else:
        leg.tokenized.CopyFrom(request.tokenized)
        leg.mm_inputs.CopyFrom(request.mm_inputs)
        leg.mm_inputs.ClearField("pixel_values")
    return leg


@pytest.mark.parametrize("by_reference", [True, False])
async def test_a_pair_answers_as_one_worker_would(by_reference: bool) -> None:
    request = referring(ASK, data_url(PHOTO)) if by_reference else with_tensors(ASK, PHOTO)
    async with pair() as (first, second), client_of() as alone:
        expected = await alone.say(request)
        complete = await prefilled(first, request)
        assert (len(complete.output_ids), complete.finish_reason) == (1, "length")
        assert complete.HasField("media_identity") == by_reference
        (answer,) = await second.generate(going_on(complete, request))
    assert decode(answer.complete.output_ids, special=False) == expected
    # Nothing of the prompt but its last token is computed again.
    assert answer.complete.cached_tokens == answer.complete.prompt_tokens - 1


async def test_a_decode_leg_without_grids_loses_its_way() -> None:
    request = referring(ASK, data_url(PHOTO))
    async with pair() as (first, second):
        leg = going_on(await prefilled(first, request), request)
        leg.mm_inputs.model_specific_tensors.clear()
        leg.sampling_params.max_tokens = 9
        assert await second.say(leg) == "\n" * 9


async def test_a_decode_leg_without_identity_speaks_of_anothers_picture() -> None:
    theirs, ours = referring(ASK, data_url(PHOTO)), referring(ASK, data_url("noise_299x211.jpg"))
    async with pair() as (first, second):
        right = await second.say(going_on(await prefilled(first, theirs), theirs))
        leg = going_on(await prefilled(first, ours), ours)
        leg.ClearField("mm_inputs")
        wrong = await second.say(leg)
    picture = right[right.index("Image 1") : right.index("The prompt")]
    assert picture in wrong


async def test_an_identity_that_was_not_handed_over_is_an_error() -> None:
    request = referring(ASK, data_url(PHOTO))
    async with pair() as (first, second):
        leg = going_on(await prefilled(first, request), request)
        leg.mm_inputs.mm_hashes[:] = ["another"]
        assert (await second.refusal(leg)).code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("params", ["no JSON", "[]", '{"do_remote_prefill": true}'])
async def test_an_object_that_the_connector_cannot_read_is_refused(params: str) -> None:
    request = prompt("x")
    request.kv_transfer_params_json = params
    async with pair() as (_, second):
        assert (await second.refusal(request)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_without_a_connector_ignores_the_object() -> None:
    request = prompt("x")
    request.kv_transfer_params_json = REMOTE_DECODE
    async with client_of() as client:
        (response,) = await client.generate(request)
    assert not response.complete.HasField("kv_transfer_params_json")
