"""A worker that is killed under its requests. The last file, since its workers stay dead."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from router.wire import engine
from tests.real.asking import (
    DEADLINE,
    IMAGE,
    ask,
    connect,
    data_url,
    prompt,
    reason_of,
    ref,
    request,
)
from tests.real.conftest import FLAGS
from tests.real.recorder import recording
from tests.real.stack import Stack, Worker
from tests.real.test_ends import LONG
from tests.real.test_guard import fewer_patches_than_the_grid_says
from tests.real.waiting import until_in_flight, until_not_ready

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


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
    stack: Stack, floats_worker: Worker
) -> None:
    router = stack.router("--worker", floats_worker.address, *FLAGS)
    asked = request(
        prompt(IMAGE, "Tell me all."), ref(data_url("grey_203x151.jpg")), max_tokens=LONG
    )
    async with connect(router.address) as stub:
        seen = 0
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for response in stub.Generate(asked, timeout=DEADLINE):
                assert response.WhichOneof("response") == "chunk"
                seen += len(response.chunk.token_ids)
                if floats_worker.alive:
                    floats_worker.kill()
    assert 0 < seen < LONG
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(error.value) == "WORKER_STREAM_BROKEN"
    router.stop()


async def test_a_worker_whose_engine_has_died_is_left_alone(
    stack: Stack, refs_worker: Worker
) -> None:
    """Its port stays open and its stream of health says SERVING; only its engine is no more."""
    asked = request(prompt(IMAGE, "What is it?"), ref(data_url("grey_203x151.jpg")))
    with recording(refs_worker.address) as recorder:
        router = stack.router("--worker", recorder.address, "--shm", "off", *FLAGS)
        assert (await ask(router.address, asked)).ids
        raw = recorder.of("Generate")[-1].raw_request
        deadly = engine.GenerateRequest.FromString(raw)
        fewer_patches_than_the_grid_says(deadly)
        # Else it is served from the encoder's cache.
        deadly.mm_inputs.mm_hashes[0] = "never seen"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(refs_worker.address, deadly)
        assert error.value.code() is grpc.StatusCode.INTERNAL
        await until_not_ready(router)
        sent = len(recorder.of("Generate"))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(router.address, asked)
        assert reason_of(error.value) == "NO_AVAILABLE_WORKER"
        assert len(recorder.of("Generate")) == sent
        router.stop()
    refs_worker.kill()
