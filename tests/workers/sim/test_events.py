"""KV cache events and load records, as a router subscribes to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from router.vision.identity import item_identity
from router.wire import common, engine
from tests.workers.sim.client import (
    IMAGES,
    PICTURE,
    Client,
    client_of,
    data_url,
    prompt,
    referring,
    with_tensors,
)
from workers.sim import SimOptions
from workers.sim.tokenizer import encode

QUIET = 3600.0
# Asked in order to give the worker's loop a turn.
_NO_LOADS = engine.GetLoadsRequest()


@asynccontextmanager
async def subscribed(client: Client, **fields: Any) -> AsyncIterator[Any]:
    """An open subscription."""
    call = client.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(**fields))
    while not client.worker.events.readers:
        await client.stub.GetLoads(_NO_LOADS)
    try:
        yield call
    finally:
        call.cancel()


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        while await call.read() is not grpc.aio.EOF:
            pass
    return error.value.code()


async def test_a_prompts_full_blocks_are_stored_in_a_chain() -> None:
    text = "0123456789abcdef" * 2 + "rest"
    async with (
        client_of(SimOptions(heartbeat=QUIET)) as client,
        subscribed(client) as call,
    ):
        await client.generate(prompt(text, max_tokens=1))
        batch = await call.read()
    assert batch.sequence_number == 1
    (event,) = batch.events
    assert not event.stored.HasField("parent_block_hash")
    blocks = event.stored.blocks
    assert [list(block.token_ids) for block in blocks] == [encode("0123456789abcdef")] * 2
    assert {block.block_size for block in blocks} == {16}
    assert blocks[0].block_hash != blocks[1].block_hash


async def test_output_blocks_follow_with_their_parent() -> None:
    async with (
        client_of(SimOptions(heartbeat=QUIET)) as client,
        subscribed(client) as call,
    ):
        (response,) = await client.generate(prompt("x" * 24, max_tokens=10))
        first, second = await call.read(), await call.read()
    assert second.sequence_number == first.sequence_number + 1
    (parent,) = first.events[0].stored.blocks
    stored = second.events[0].stored
    assert stored.parent_block_hash == parent.block_hash
    (block,) = stored.blocks
    said = list(response.complete.output_ids)
    assert list(block.token_ids) == encode("x" * 8) + said[:8]


async def test_what_is_stored_already_is_not_told_again() -> None:
    async with (
        client_of(SimOptions(heartbeat=QUIET)) as client,
        subscribed(client) as call,
    ):
        await client.generate(prompt("x" * 40, max_tokens=1))
        await client.generate(prompt("x" * 40, max_tokens=1))
        await client.generate(prompt("y" * 40, max_tokens=1))
        await call.read()
        second = await call.read()
    assert list(second.events[0].stored.blocks[0].token_ids) == encode("y" * 16)


async def test_blocks_name_the_media_in_them_with_the_offset_from_the_block() -> None:
    request = with_tensors("0123456789" + PICTURE + "x" * 20, "tiny_28x28.jpg", hashes=["the hash"])
    request.sampling_params.max_tokens = 1
    place = request.mm_inputs.mm_placeholders[0]
    async with (
        client_of(SimOptions(heartbeat=QUIET)) as client,
        subscribed(client) as call,
    ):
        await client.generate(request)
        batch = await call.read()
    blocks = batch.events[0].stored.blocks
    for at, block in enumerate(blocks):
        keys = [(k.multimodal.identifier, k.multimodal.offset) for k in block.extra_keys]
        overlaps = place.offset < (at + 1) * 16 and place.offset + place.length > at * 16
        assert keys == ([("the hash", place.offset - at * 16)] if overlaps else [])
    assert any(block.extra_keys for block in blocks)
    assert not blocks[-1].extra_keys


async def test_a_picture_by_reference_is_known_by_vllms_own_identifier() -> None:
    encoded = (IMAGES / "tiny_28x28.jpg").read_bytes()
    async with (
        client_of(SimOptions(heartbeat=QUIET, model="org/model")) as client,
        subscribed(client) as call,
    ):
        await client.generate(referring(PICTURE, data_url("tiny_28x28.jpg")))
        batch = await call.read()
    identifiers = {
        key.multimodal.identifier
        for block in batch.events[0].stored.blocks
        for key in block.extra_keys
    }
    assert identifiers == {item_identity("image", encoded, "org/model")}


async def test_room_for_new_blocks_is_made_by_removing_old_ones() -> None:
    async with (
        client_of(SimOptions(heartbeat=QUIET, kv_blocks=4)) as client,
        subscribed(client) as call,
    ):
        await client.generate(prompt("x" * 48, max_tokens=1))
        await client.generate(prompt("y" * 48, max_tokens=1))
        stored, removed = await call.read(), await call.read()
    old = [block.block_hash for block in stored.events[0].stored.blocks]
    gone = list(removed.events[0].removed.block_hashes)
    # Children go before their parents.
    assert gone == old[::-1][: len(gone)]
    assert gone


async def test_a_flush_is_told() -> None:
    async with (
        client_of(SimOptions(heartbeat=QUIET)) as client,
        subscribed(client) as call,
    ):
        await client.stub.FlushCache(common.FlushCacheRequest())
        batch = await call.read()
    assert batch.events[0].WhichOneof("data") == "cleared"


async def test_every_batch_says_how_busy_the_engine_is() -> None:
    async with (
        client_of(SimOptions(heartbeat=QUIET)) as client,
        subscribed(client) as call,
    ):
        await client.generate(prompt("x" * 40, max_tokens=1))
        batch = await call.read()
    assert batch.load.running_requests == 1
    assert batch.load.max_running_requests == 64
    assert not batch.load.load_only
    assert batch.load.HasField("waiting_uncached_tokens")


async def test_heartbeats_come_when_asked_for_and_carry_no_number_of_their_own() -> None:
    async with (
        client_of(SimOptions(heartbeat=0.05)) as client,
        subscribed(client, load_records_before_first_batch=True) as call,
    ):
        beats = [await call.read() for _ in range(3)]
        await client.generate(prompt("x" * 40, max_tokens=1))
        while (batch := await call.read()).load.load_only:
            beats.append(batch)
        after = await call.read()
    assert {beat.sequence_number for beat in beats} == {0}
    assert all(beat.load.load_only and not beat.events for beat in beats)
    samples = [beat.load.sample for beat in beats]
    assert samples == sorted(set(samples))
    assert batch.sequence_number == 1
    assert (after.load.load_only, after.sequence_number) == (True, 1)


async def test_heartbeats_wait_for_the_first_batch_otherwise() -> None:
    async with (
        client_of(SimOptions(heartbeat=0.02)) as client,
        subscribed(client) as call,
    ):
        client.worker.events.beat()
        await client.generate(prompt("x" * 40, max_tokens=1))
        assert not (await call.read()).load.load_only


async def test_only_the_present_can_be_subscribed_to() -> None:
    async with client_of() as client:
        call = client.stub.SubscribeKvEvents(
            common.SubscribeKvEventsRequest(start_sequence_number=5)
        )
        assert await code_of(call) is grpc.StatusCode.OUT_OF_RANGE


async def test_a_worker_without_events_does_not_implement_them() -> None:
    async with client_of(SimOptions(kv_events=False)) as client:
        call = client.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())
        assert await code_of(call) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_hole_in_the_numbers_can_be_made() -> None:
    async with (
        client_of(SimOptions(heartbeat=QUIET)) as client,
        subscribed(client) as call,
    ):
        client.worker.events.skip(3)
        await client.generate(prompt("x" * 40, max_tokens=1))
        assert (await call.read()).sequence_number == 4


async def test_a_cut_subscription_ends_with_data_loss() -> None:
    async with client_of(SimOptions(heartbeat=QUIET)) as client, subscribed(client) as call:
        client.worker.events.cut()
        assert await code_of(call) is grpc.StatusCode.DATA_LOSS


async def test_a_reader_that_has_left_is_forgotten() -> None:
    async with client_of(SimOptions(heartbeat=QUIET)) as client:
        async with subscribed(client):
            pass
        while client.worker.events.readers:
            await client.stub.GetLoads(_NO_LOADS)
