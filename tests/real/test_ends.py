"""How requests end other than by finishing: given up, aborted, or their worker gone."""

from __future__ import annotations

import asyncio
import uuid

import grpc
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
    reason_of,
    ref,
    request,
    running,
)
from tests.real.conftest import FLAGS, router_for
from tests.real.stack import Router, Stack, Worker

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

# At some hundred tokens a second, these are at work for several seconds.
LONG = 1500


async def until_idle(address: str) -> None:
    """Waits until a worker runs nothing. A test that waits for ever fails by its timeout."""
    while await running(address):  # noqa: ASYNC110 - the worker tells nobody
        await asyncio.sleep(0.05)


async def until_in_flight(router: Router, worker: Worker) -> None:
    while not router.metric("router_worker_in_flight", worker=worker.address):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


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


async def test_a_worker_that_dies_before_any_output_costs_nobody_an_answer(
    stack: Stack, refs_worker: Worker, tensors_worker: Worker
) -> None:
    router = stack.router(
        *("--worker", refs_worker.address, "--worker", tensors_worker.address), *FLAGS
    )
    asked = request(prompt(IMAGE, "What is it?"), ref(data_url("grey_203x151.jpg")))
    expected = (await ask(router.address, asked)).ids
    tensors_worker.freeze()
    # Two, so that one goes to the worker that will not answer.
    streams = [asyncio.create_task(ask(router.address, asked)) for _ in range(2)]
    await until_in_flight(router, tensors_worker)
    tensors_worker.kill()
    answers = await asyncio.gather(*streams)
    assert [answer.ids for answer in answers] == [expected] * 2
    assert sorted(answer.trailers["mmrouter-attempts"] for answer in answers) == ["1", "2"]
    assert {a.trailers["mmrouter-worker"] for a in answers} == {refs_worker.address}
    router.stop()


async def test_a_worker_that_dies_in_the_middle_ends_the_stream_as_broken(
    stack: Stack, tensors_worker: Worker
) -> None:
    router = stack.router("--worker", tensors_worker.address, *FLAGS)
    asked = request(
        prompt(IMAGE, "Tell me all."), ref(data_url("grey_203x151.jpg")), max_tokens=LONG
    )
    async with connect(router.address) as stub:
        call = stub.Generate(asked, timeout=DEADLINE)
        assert (await call.read()).WhichOneof("response") == "chunk"
        tensors_worker.kill()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in call:
                pass
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(error.value) == "WORKER_STREAM_BROKEN"
    router.stop()
