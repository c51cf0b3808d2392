"""How requests end other than by finishing: given up or aborted; and two of one name."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from router.wire import engine
from tests.real.asking import (
    DEADLINE,
    IMAGE,
    ask,
    collect,
    connect,
    data_url,
    prompt,
    ref,
    request,
    running,
)
from tests.real.conftest import router_for
from tests.real.stack import Stack, Worker
from tests.real.waiting import until_idle, until_in_flight

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

# At some hundred tokens a second, these are at work for several seconds.
LONG = 1500


@pytest.mark.parametrize("mode", [engine.ROUTER, engine.WORKER], ids=["router", "worker"])
async def test_a_client_that_gives_up_frees_the_worker(
    stack: Stack, refs_worker: Worker, mode: engine.MmProcessing
) -> None:
    router = router_for(stack, refs_worker)
    cancelled = router.metric("router_requests_total", outcome="client_cancelled")
    asked = request(
        prompt(IMAGE, "Tell me all."), ref(data_url("grey_203x151.jpg")), mode=mode, max_tokens=LONG
    )
    async with connect(router.address) as stub:
        call = stub.Generate(asked, timeout=DEADLINE)
        for _ in range(3):
            response = await call.read()
            assert response.WhichOneof("response") == "chunk"
        assert await running(refs_worker.address) == 1
        call.cancel()
    await until_idle(refs_worker.address)
    while router.metric("router_requests_in_flight"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert router.metric("router_requests_total", outcome="client_cancelled") == cancelled + 1
    assert router.metric("router_worker_in_flight") == 0


async def test_an_abort_by_the_clients_own_id_ends_the_stream_well(
    stack: Stack, refs_worker: Worker
) -> None:
    router = router_for(stack, refs_worker)
    name = uuid.uuid4().hex
    asked = request(prompt("Tell me all."), max_tokens=LONG, request_id=name)
    async with connect(router.address) as stub:
        stream = asyncio.create_task(collect(stub, asked))
        await until_in_flight(router, refs_worker)
        while not await running(refs_worker.address):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await stub.Abort(engine.AbortRequest(request_ids=[name, "nobody"]), timeout=DEADLINE)
        answer = await stream
    assert answer.choices[0].finish_reason == "abort"
    assert len(answer.ids) < LONG
    await until_idle(refs_worker.address)


async def test_two_requests_of_one_id_are_both_served(stack: Stack, refs_worker: Worker) -> None:
    router = router_for(stack, refs_worker)
    one, two = request(prompt("One."), request_id="x"), request(prompt("Two."), request_id="x")
    alone = [(await ask(router.address, asked)).ids for asked in (one, two)]
    together = await asyncio.gather(ask(router.address, one), ask(router.address, two))
    assert [answer.ids for answer in together] == alone
