"""Prefill here, decode there: what the connector's object and the media identity carry."""

from __future__ import annotations

import asyncio
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
        if request.HasField("mm_inputs"):
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


async def test_a_prefill_whose_first_token_ends_the_answer_hands_nothing_over() -> None:
    async with pair() as (first, _):
        request = prompt("x", stop_token_ids=[ord("I")])
        complete = await prefilled(first, request)
        assert complete.finish_reason == "stop"
        assert not complete.HasField("kv_transfer_params_json")


async def test_a_cache_of_another_prompt_is_an_error_unless_the_worker_is_gullible() -> None:
    async with pair() as (first, second):
        complete = await prefilled(first, prompt("one"))
        leg = going_on(complete, prompt("two"))
        assert (await second.refusal(leg)).code() is grpc.StatusCode.INTERNAL
        second.worker.change(gullible=True)
        assert 'ends "two"' in await second.say(leg)


async def test_a_gullible_worker_answers_for_whatever_picture_came_last() -> None:
    theirs, ours = referring(ASK, data_url(PHOTO)), referring(ASK, data_url("noise_299x211.jpg"))
    async with pair() as (first, second):
        second.worker.change(gullible=True)
        right = await second.say(going_on(await prefilled(first, theirs), theirs))
        leg = going_on(await prefilled(first, ours), ours)
        leg.mm_inputs.mm_hashes[:] = ["another"]
        assert right[right.index("Image 1") : right.index("The prompt")] in await second.say(leg)


async def test_a_worker_may_keep_to_itself_what_references_became() -> None:
    async with pair() as (first, _):
        first.worker.change(media_identity=False)
        complete = await prefilled(first, referring(ASK, data_url(PHOTO)))
        assert not complete.HasField("media_identity")
        assert complete.HasField("kv_transfer_params_json")


# -- Mooncake


@asynccontextmanager
async def mooncake() -> AsyncIterator[tuple[Client, Client]]:
    connector = {"kv_connector": "MooncakeConnector"}
    prefill = SimOptions(kv_engine_id="p", bootstrap="127.0.0.1:0", **connector)
    async with client_of(prefill) as first, client_of(SimOptions(**connector)) as second:
        yield first, second


def sending(request: engine.GenerateRequest, transfer_id: str = "t") -> engine.GenerateRequest:
    leg = engine.GenerateRequest()
    leg.CopyFrom(request)
    leg.sampling_params.max_tokens = 1
    wish = {"do_remote_decode": True, "transfer_id": transfer_id}
    leg.kv_transfer_params_json = json.dumps(wish)
    return leg


def fetching(
    request: engine.GenerateRequest, first: Client, **changes: str | None
) -> engine.GenerateRequest:
    leg = engine.GenerateRequest()
    leg.CopyFrom(request)
    params = {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_engine_id": "p",
        "remote_bootstrap_addr": f"http://{first.worker.bootstrap_address}",
        **changes,
    }
    leg.kv_transfer_params_json = json.dumps(params)
    return leg


@pytest.mark.parametrize("decode_first", [True, False])
async def test_a_decode_worker_waits_for_its_transfer_and_takes_it(decode_first: bool) -> None:
    request = prompt("Hello")
    async with mooncake() as (first, second), client_of() as alone:
        if not decode_first:
            await first.generate(sending(request))
            assert first.worker.bootstrap.held == 1
        decoded = asyncio.create_task(second.say(fetching(request, first)))
        if decode_first:
            while not second.worker.engine.active:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.002)
            await first.generate(sending(request))
        assert await decoded == await alone.say(request)
        assert (first.worker.bootstrap.held, first.worker.bootstrap.fetched) == (0, 1)


@pytest.mark.parametrize("missing", ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"])
async def test_a_decode_leg_must_say_what_to_fetch_and_where(missing: str) -> None:
    async with mooncake() as (first, second):
        leg = fetching(prompt("Hello"), first, **{missing: None})
        assert (await second.refusal(leg)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_prefill_leg_must_bring_a_transfer_id() -> None:
    async with mooncake() as (first, _):
        refused = await first.refusal(sending(prompt("Hello"), ""))
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_another_engines_transfer_cannot_be_had() -> None:
    request = prompt("Hello")
    async with mooncake() as (first, second):
        await first.generate(sending(request))
        refused = await second.refusal(fetching(request, first, remote_engine_id="other"))
        assert refused.code() is grpc.StatusCode.INTERNAL
        refused = await second.refusal(
            fetching(request, first, remote_bootstrap_addr="http://127.0.0.1:1")
        )
        assert refused.code() is grpc.StatusCode.INTERNAL
        assert first.worker.bootstrap.held == 1


async def test_a_transfer_that_does_not_come_is_given_up() -> None:
    async with mooncake() as (first, second):
        second.worker.change(transfer_timeout=0.05)
        refused = await second.refusal(fetching(prompt("Hello"), first))
        assert refused.code() is grpc.StatusCode.INTERNAL


async def test_an_abort_forgets_what_was_offered_and_ends_who_waits() -> None:
    request = prompt("Hello", "mine", n=2)
    async with mooncake() as (first, second):
        await first.generate(sending(request))
        await first.stub.Abort(engine.AbortRequest(request_ids=["mine"]))
        assert first.worker.bootstrap.held == 0
        waiting = asyncio.create_task(second.generate(fetching(request, first)))
        while not second.worker.engine.active:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.002)
        await second.stub.Abort(engine.AbortRequest(request_ids=["mine"]))
        reasons = [response.complete.finish_reason for response in await waiting]
        assert reasons == ["abort", "abort"]
