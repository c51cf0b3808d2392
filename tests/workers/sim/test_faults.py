"""Trouble on demand, by metadata, by the prompt, and by rule."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.wire import ENGINE_SERVICE, engine
from tests.workers.sim.client import chunk_ids, client_of, completes, prompt, streamed
from workers.sim import SimOptions
from workers.sim.faults import Trouble, parse_rule, parse_trouble


def by_metadata(directive: str) -> list[tuple[str, str]]:
    return [("sim-fault", directive)]


async def test_a_call_fails_before_output_as_its_metadata_asks() -> None:
    async with client_of() as client:
        error = await client.refusal(prompt("x"), by_metadata("fail-before-output=INTERNAL"))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert await client.say(prompt("x"))


async def test_a_directive_in_the_prompt_works_in_ids_in_text_and_in_the_original_text() -> None:
    directive = "please [[sim: fail=ABORTED]] now"
    original = prompt("ids without it")
    original.tokenized.original_text = directive
    async with client_of() as client:
        for request in (prompt(directive), engine.GenerateRequest(text=directive), original):
            assert (await client.refusal(request)).code() is grpc.StatusCode.ABORTED


async def test_a_stream_breaks_after_so_many_chunks() -> None:
    async with client_of() as client:
        call = client.stub.Generate(streamed("x"), metadata=by_metadata("fail-after-chunks=3"))
        received = []
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            async for response in call:
                received.append(response)  # noqa: PERF401
    assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(chunk_ids(received)) == 3
    assert not completes(received)


async def test_the_status_of_a_break_can_be_chosen() -> None:
    async with client_of() as client:
        error = await client.refusal(streamed("x"), by_metadata("fail-after-chunks=1:DATA_LOSS"))
    assert error.code() is grpc.StatusCode.DATA_LOSS


async def test_a_hanging_call_says_nothing_and_holds_its_place() -> None:
    async with client_of() as client:
        call = client.stub.Generate(prompt("x"), metadata=by_metadata("hang"), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await call.read()
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_saturated_worker_says_so() -> None:
    async with client_of() as client:
        error = await client.refusal(prompt("x"), by_metadata("saturate, pushback=250ms"))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert (error.details() or "").startswith("worker is saturated")
    assert ("grpc-retry-pushback-ms", "250") in tuple(error.trailing_metadata() or ())


async def test_a_stream_can_end_without_its_complete() -> None:
    async with client_of() as client:
        parts = await client.generate(streamed("x"), by_metadata("end-without-complete"))
    assert chunk_ids(parts)
    assert not completes(parts)


async def test_a_failed_constraint_is_marked_in_the_trailers() -> None:
    async with client_of() as client:
        error = await client.refusal(prompt("x"), by_metadata("constraint-failed"))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "smg-constraint-failed" in dict(tuple(error.trailing_metadata() or ()))


async def test_a_slow_first_token_is_late_by_at_least_that_much() -> None:
    async with client_of() as client:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await client.generate(prompt("x"), by_metadata("slow-first=80ms"))
        # Timers and clocks may differ by some milliseconds.
        assert loop.time() - start >= 0.07


async def test_a_rule_with_a_count_meets_the_first_calls_alone() -> None:
    async with client_of(SimOptions(faults=("2*fail=UNAVAILABLE",))) as client:
        for _ in range(2):
            assert (await client.refusal(prompt("x"))).code() is grpc.StatusCode.UNAVAILABLE
        assert await client.say(prompt("x"))


async def test_a_rule_can_be_for_another_rpc() -> None:
    async with client_of(SimOptions(faults=("GetServerInfo: 1*fail=INTERNAL",))) as client:
        assert await client.say(prompt("x"))
        with pytest.raises(grpc.aio.AioRpcError):
            await client.stub.GetServerInfo(engine.GetServerInfoRequest())
        await client.stub.GetServerInfo(engine.GetServerInfoRequest())


async def test_a_calls_own_directive_leaves_the_rules_for_others() -> None:
    async with client_of(SimOptions(faults=("1*fail=UNAVAILABLE",))) as client:
        error = await client.refusal(prompt("x"), by_metadata("fail=INTERNAL"))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert (await client.refusal(prompt("x"))).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_dead_engine_can_be_replaced() -> None:
    async with client_of() as client:
        error = await client.refusal(prompt("x"), by_metadata("die"))
        assert error.code() is grpc.StatusCode.INTERNAL
        client.worker.revive()
        assert await client.say(prompt("x"))


@pytest.mark.parametrize("service", ["", ENGINE_SERVICE])
async def test_a_dead_engine_fails_every_check_and_tells_no_open_watch(service: str) -> None:
    question = health_pb2.HealthCheckRequest(service=service)
    serving = health_pb2.HealthCheckResponse.SERVING
    async with client_of() as client:
        health: Any = health_pb2_grpc.HealthStub(client.channel)
        watch = health.Watch(question)
        assert (await watch.read()).status == serving
        client.worker.engine.die("as was asked for")
        for _ in range(2):
            assert (await health.Check(question)).status != serving
        assert (await health.Watch(question).read()).status != serving
        # What it hears next is a change that it is told of.
        client.worker.revive()
        await client.worker.set_serving(False)
        assert (await watch.read()).status != serving
        assert (await health.Check(question)).status != serving
        await client.worker.set_serving(True)
        assert (await watch.read()).status == serving
        assert (await health.Check(question)).status == serving
        watch.cancel()


async def test_a_directive_that_is_none_is_the_clients_fault() -> None:
    async with client_of() as client:
        error = await client.refusal(prompt("[[sim: explode]]"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "explode" in (error.details() or "")


def test_directives_combine() -> None:
    assert parse_trouble("slow-first=2s; fail-after-chunks=3") == Trouble(
        slow_first=2.0, fail_after_chunks=3
    )


@pytest.mark.parametrize("text", ["", "fail=NOPE", "fail-after-chunks", "slow-first=soon", "x=1"])
def test_what_is_no_directive_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_rule(text)


def test_options_refuse_a_rule_that_is_none() -> None:
    with pytest.raises(ValueError, match="explode"):
        SimOptions(faults=("explode",))
