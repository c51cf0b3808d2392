"""A worker that is killed under its requests. The last file, since its workers stay dead."""

from __future__ import annotations

import asyncio

import grpc
import pytest

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
from tests.real.stack import Stack, Worker
from tests.real.test_ends import LONG
from tests.real.waiting import until_in_flight

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
