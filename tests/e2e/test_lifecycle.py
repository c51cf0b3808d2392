"""`mmrouter serve` as a process: its start, its readiness, its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import pytest

from router.heap import Allocator
from router.wire import ENGINE_SERVICE, engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from tests.e2e.processes import START, Running, router
from tests.serving import (
    completes,
    eventually,
    nobody_at,
    refusal_of,
    serving,
    streamed,
    tokenized,
)
from workers.sim import SimOptions, SimWorker

END = 30.0


@dataclass
class Process:
    """A router of its own, and its pages."""

    running: Running

    @property
    def address(self) -> str:
        return self.running.address

    @property
    def process(self) -> asyncio.subprocess.Process:
        return self.running.process

    async def get(self, path: str) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.running.http}{path}") as answer,
        ):
            return answer.status, await answer.text()

    async def answers(self, path: str, status: int) -> str:
        """Waits until a path answers with a status; gives the body."""
        text = ""
        async with asyncio.timeout(END):
            got = -1
            while got != status:
                got, text = await self.get(path)
                await asyncio.sleep(0.01)
        return text

    async def counts(self, labels: str) -> None:
        """Waits until /metrics has a sample with these labels."""
        async with asyncio.timeout(END):
            while labels not in (await self.get("/metrics"))[1]:  # noqa: ASYNC110 - asks a server
                await asyncio.sleep(0.01)

    async def ended(self) -> int:
        return await self.running.ended()


@asynccontextmanager
async def mmrouter(*arguments: str) -> AsyncIterator[Process]:
    """`mmrouter serve` with these arguments, listening on free ports."""
    async with router("--load-interval", "50ms", *arguments) as running:
        yield Process(running)


@pytest.fixture
async def sim() -> AsyncIterator[SimWorker]:
    worker = SimWorker(SimOptions())
    await worker.start("127.0.0.1:0")
    yield worker
    await worker.stop(0)


async def rest_of(call: Any) -> list[engine.GenerateResponse]:
    return [response async for response in call]


async def test_a_router_that_is_told_to_stop_lets_requests_finish(sim: SimWorker) -> None:
    async with mmrouter("--worker", sim.address, "--drain-timeout", "60s") as router:
        await router.answers("/readyz", 200)
        assert await router.get("/livez") == (200, "ok\n")
        async with grpc.aio.insecure_channel(router.address) as channel:
            stub = VllmEngineStub(channel)
            running = stub.Generate(streamed("[[sim: hang-after-chunks=2]]", "a"), timeout=30)
            await anext(aiter(running))
            router.process.send_signal(signal.SIGTERM)
            why = await router.answers("/readyz", 503)
            assert "stopping" in why
            assert (await router.get("/livez"))[0] == 200
            refused = await refusal_of(rest_of(stub.Generate(tokenized("x"), timeout=10)))
            assert refused.reason == "DRAINING"
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            assert refused.retry_after is not None
            await router.counts('outcome="unavailable",reason="draining"')
            # The stream goes on, and is ended here only because nothing else would end it.
            await stub.Abort(engine.AbortRequest(request_ids=["a"]), timeout=10)
            assert [c.finish_reason for c in completes(await rest_of(running))] == ["abort"]
        assert await router.ended() == 0


async def test_a_misspelt_variable_is_a_warning_and_a_missing_folder_an_end() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "serve", "--listen", "127.0.0.1:0", "--http", ""),
        *("--media-local-root", "/nowhere"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "MMROUTER_POLCY": "prefix", "MMROUTER_PORT": "tcp://10.0.0.7:1"},
    )
    async with asyncio.timeout(START):
        _, told = await process.communicate()
    assert process.returncode == 1
    warning, end = told.decode().splitlines()
    assert json.loads(warning)["event"] == "unknown_variable"
    assert json.loads(warning)["nearest"] == "MMROUTER_POLICY"
    assert end == "mmrouter serve: --media-local-root /nowhere is not a folder"


async def test_a_second_signal_stops_at_once(sim: SimWorker) -> None:
    async with mmrouter("--worker", sim.address, "--drain-timeout", "300s") as router:
        await router.answers("/readyz", 200)
        async with grpc.aio.insecure_channel(router.address) as channel:
            stub = VllmEngineStub(channel)
            running = stub.Generate(streamed("[[sim: hang-after-chunks=2]]"), timeout=60)
            await anext(aiter(running))
            router.process.send_signal(signal.SIGTERM)
            await router.answers("/readyz", 503)
            router.process.send_signal(signal.SIGTERM)
            assert await router.ended() == 0
            # Its stream has ended, and not as though the answer were whole.
            try:
                reasons = [c.finish_reason for c in completes(await rest_of(running))]
                assert reasons == ["abort"]
            except grpc.aio.AioRpcError as error:
                assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
            await eventually(lambda: sim.stats.live == 0)


async def test_what_outlives_the_drain_is_aborted_at_its_worker(sim: SimWorker) -> None:
    async with mmrouter("--worker", sim.address, "--drain-timeout", "200ms") as router:
        await router.answers("/readyz", 200)
        async with grpc.aio.insecure_channel(router.address) as channel:
            stub = VllmEngineStub(channel)
            running = stub.Generate(streamed("[[sim: hang-after-chunks=2]]"), timeout=60)
            silent = stub.Generate(streamed("[[sim: hang]]"), timeout=60)
            await anext(aiter(running))
            await eventually(lambda: sim.stats.live == 2)
            # As a terminal does that is closed.
            router.process.send_signal(signal.SIGHUP)
            for call in (running, silent):
                ended = await refusal_of(rest_of(call))
                assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
                assert ended.retry_after is not None
            assert await router.ended() == 0
        await eventually(lambda: sim.stats.calls["Abort"] == 2)


async def test_a_router_without_workers_is_up_and_not_ready() -> None:
    with nobody_at() as (address,):
        async with mmrouter("--worker", address) as router:
            assert (await router.get("/livez"))[0] == 200
            status, why = await router.get("/readyz")
            assert status == 503 and why.strip()
            _, page = await router.get("/statusz")
            assert "pending" in page
            _, metrics = await router.get("/metrics")
            assert "router_requests_in_flight 0.0" in metrics
            router.process.send_signal(signal.SIGINT)
            assert await router.ended() == 0


async def test_bad_settings_are_told_and_nothing_starts() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "serve", "--max-concurrent", "0", "--queue-size", "-1"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await process.communicate()
    assert process.returncode == 2
    assert b"max_concurrent: " in told and b"queue_size: " in told
    assert b"Traceback" not in told


async def test_an_address_that_is_taken_is_told_in_one_line(sim: SimWorker) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "serve", "--listen", sim.address, "--http", ""),
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await process.communicate()
    assert process.returncode == 1
    (line,) = [line for line in told.decode().splitlines() if line.startswith("mmrouter serve:")]
    assert sim.address in line
    assert b"Traceback" not in told


# -- The same in this process, where it can be looked into


async def test_waiting_requests_are_refused_as_the_drain_begins() -> None:
    async with serving(SimOptions(), max_concurrent=1, queue_timeout="60s") as served:
        running = served.stub.Generate(streamed("[[sim: hang-after-chunks=2]]", "a"), timeout=15)
        await anext(aiter(running))
        waiting = asyncio.create_task(refusal_of(served.generate(tokenized("x"))))
        await eventually(lambda: served.app.admission.waiting == 1)
        served.app.stop()
        assert (await waiting).reason == "DRAINING"
        assert await served.health() == 1
        async with asyncio.timeout(10):
            while await served.health(ENGINE_SERVICE) != 2:  # noqa: ASYNC110 - asks a server
                await asyncio.sleep(0)
        await served.stub.Abort(engine.AbortRequest(request_ids=["a"]), timeout=10)
        assert completes(await rest_of(running))
        await served.stopped()


async def test_a_router_looks_after_freed_memory_while_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []

    def unused() -> int:
        looks.append(threading.get_ident())
        return 0

    monkeypatch.setattr("router.app.allocator", lambda: Allocator(unused, lambda: None))
    async with serving(SimOptions()):
        await eventually(lambda: looks, "freed memory was looked at")
    # Looking waits for the allocator's lock: no work for the event loop.
    assert threading.get_ident() not in looks


async def test_a_worker_that_goes_leaves_no_words_of_grpc_between_the_log_s_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    worker = SimWorker()
    address = await worker.start("127.0.0.1:0")
    try:
        async with router("--worker", address) as running:

            def seen(state: str) -> bool:
                return state in {e["state"] for e in running.events("worker_state")}

            await eventually(lambda: seen("ready"))
            # The open Watch is cut, of which the connection is told.
            await worker.stop(0)
            await eventually(lambda: seen("unhealthy"))
            running.send(signal.SIGTERM)
            assert await running.ended() == 0
            assert running.events("text") == []
    finally:
        await worker.stop(0)
