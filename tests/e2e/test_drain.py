"""Workers and routers that go: nothing new, what runs finishes, nothing is left."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.fleet.worker import WorkerState
from router.wire import ENGINE_SERVICE
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from tests.e2e.processes import router
from tests.serving import (
    PICTURE,
    Refusal,
    completes,
    eventually,
    hold_answers,
    nobody_at,
    refusal_of,
    seeing,
    serving,
    streamed,
    tokenized,
)
from workers.sim import SimOptions, SimWorker

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


_TIME_WAIT = "06"


def sockets_to(address: str) -> int:
    """TCP sockets of this host whose peer is `address`, those that merely wait left out."""
    # The host's last bytes: 127.0.0.1 as the tables write it, whichever the family.
    peer = f"0100007F:{int(address.rpartition(':')[2]):04X}"
    rows = [
        line.split()
        # gRPC connects to IPv4 addresses by IPv6 sockets.
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return sum(row[2].endswith(peer) and row[3] != _TIME_WAIT for row in rows)


async def drained(call: Any) -> list[Any]:
    """What is left to read of a stream."""
    read = []
    while (response := await call.read()) is not grpc.aio.EOF:
        read.append(response)
    return read


async def to_the_end(call: Any) -> tuple[list[Any], Refusal | None]:
    """What is left to read of a stream, and the error that it ends with."""
    read = []
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            read.append(response)
    except grpc.aio.AioRpcError as error:
        return read, Refusal.of(error)
    return read, None


async def test_a_drained_worker_finishes_its_streams_and_leaves_no_socket() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        first, second = served.worker(0), served.worker(1)
        go_on = hold_answers(served.workers[0])
        streams = [served.stub.Generate(streamed("x"), timeout=30) for _ in range(6)]
        running = [asyncio.create_task(drained(stream)) for stream in streams]
        await eventually(lambda: served.workers[0].stats.live == 3)
        served.app.fleet.drain(first)
        taken = served.workers[0].stats.calls["Generate"]
        for _ in range(4):
            await served.generate(tokenized("y"))
        assert served.workers[0].stats.calls["Generate"] == taken
        assert served.workers[0].stats.live == 3
        go_on.set()
        for task in running:
            assert len(completes(await task)) == 1
        await eventually(lambda: first.state is WorkerState.GONE)
        await eventually(lambda: sockets_to(first.address) == 0)
        assert sockets_to(second.address) == 1
        await served.at_rest()


async def test_a_stream_that_does_not_end_is_cut_at_the_bound() -> None:
    async with serving(SimOptions(), SimOptions(), drain_timeout="200ms") as served:
        calls = []
        for _ in range(20):
            call = served.stub.Generate(streamed("[[sim: hang-after-chunks=1]]"), timeout=30)
            await call.read()
            calls.append(call)
        first = served.worker(0)
        held = first.load.in_flight
        assert held == 10
        served.app.fleet.drain(first)
        await eventually(lambda: first.state is WorkerState.GONE)
        await eventually(lambda: sum(call.done() for call in calls) == held)
        ended = [await refusal_of(drained(call)) for call in calls if call.done()]
        assert {(r.code, r.reason) for r in ended} == {
            (grpc.StatusCode.UNAVAILABLE, "WORKER_STREAM_BROKEN")
        }
        assert first.load.in_flight == 0
        await eventually(lambda: served.workers[0].stats.live == 0)
        await eventually(lambda: sockets_to(first.address) == 0)
        for call in calls:
            call.cancel()
        await served.at_rest()


async def test_a_fleet_that_follows_its_file(tmp_path: Path) -> None:
    file = tmp_path / "workers.toml"

    def write(*workers: SimWorker) -> None:
        entries = [f'[[workers]]\naddress = "{w.address}"' for w in workers]
        file.write_text("\n".join(entries) or "workers = []")

    a, b = SimWorker(), SimWorker()
    for worker in (a, b):
        await worker.start("127.0.0.1:0")
    try:
        write(a)
        settings = {"discovery": "file", "discovery_file": str(file), "discovery_interval": "10ms"}
        async with serving(**settings) as served:
            registry = served.app.registry
            await eventually(lambda: registry.routable)
            stream = served.stub.Generate(streamed("[[sim: hang-after-chunks=1]]"), timeout=30)
            await stream.read()
            write(a, b)
            await eventually(lambda: registry.get(b.address))
            await served.ready()
            for _ in range(2):
                await served.generate(tokenized("x"))
            assert b.stats.calls["Generate"] == 1
            write(b)
            old = registry.get(a.address)
            assert old is not None
            await eventually(lambda: old.state is WorkerState.DRAINING)
            for _ in range(2):
                await served.generate(tokenized("x"))
            assert a.stats.calls["Generate"] == 2
            assert not stream.done(), "the removal does not disturb what runs"
            stream.cancel()
            await eventually(lambda: list(registry) == [registry.get(b.address)])
            await eventually(lambda: sockets_to(a.address) == 0)
    finally:
        for worker in (a, b):
            await worker.stop(0)


async def test_a_static_list_outlives_workers_that_are_down_at_the_start() -> None:
    with nobody_at(2) as addresses:
        async with serving(*addresses, ready=False) as served:
            assert await served.health(ENGINE_SERVICE) == NOT_SERVING
            refused = await served.refusal(tokenized("x"))
            assert (refused.code, refused.reason) == (
                grpc.StatusCode.UNAVAILABLE,
                "NO_AVAILABLE_WORKER",
            )
            late = SimWorker()
            await late.start(addresses[1])
            try:
                await eventually(lambda: served.app.registry.routable)
                assert await served.say(tokenized("x"))
                assert len(served.app.registry) == 2
            finally:
                await late.stop(0)


# -- The router itself


async def test_a_stopping_router_says_so_first_and_finishes_what_runs() -> None:
    worker = SimWorker()
    await worker.start("127.0.0.1:0")
    go_on = hold_answers(worker)
    try:
        async with (
            router("--worker", worker.address, "--drain-timeout", "1h") as running,
            grpc.aio.insecure_channel(running.address) as channel,
            aiohttp.ClientSession() as web,
        ):
            stub = VllmEngineStub(channel)
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=ENGINE_SERVICE))
            while (await watch.read()).status != SERVING:
                pass
            stream = stub.Generate(streamed("x"), timeout=60)
            first = await stream.read()
            running.send(signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            async with web.get(f"{running.http}/readyz") as answer:
                assert (answer.status, await answer.text()) == (503, "the router is stopping\n")
            async with web.get(f"{running.http}/livez") as answer:
                assert answer.status == 200
            async with web.get(f"{running.http}/metrics") as answer:
                assert "router_requests_in_flight 1.0" in await answer.text()
            refused = await refusal_of(drained(stub.Generate(tokenized("y"), timeout=30)))
            assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert refused.retry_after is not None
            go_on.set()
            rest = await drained(stream)
            assert len(completes([first, *rest])) == 1
            assert await running.ended() == 0
            assert worker.stats.aborted == worker.stats.cancelled == 0
            assert len(running.events("draining")) == 1
            assert not running.events("drain_timeout")
    finally:
        await worker.stop(0)


@pytest.mark.parametrize("again", [False, True], ids=["limit", "second signal"])
async def test_a_router_does_not_wait_for_ever(again: bool) -> None:
    worker = SimWorker()
    await worker.start("127.0.0.1:0")
    limit = "1h" if again else "200ms"
    try:
        async with (
            router("--worker", worker.address, "--drain-timeout", limit) as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            stub = VllmEngineStub(channel)
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(service=ENGINE_SERVICE))
            while (await watch.read()).status != SERVING:
                pass
            stream = stub.Generate(streamed("[[sim: hang-after-chunks=1]]"), timeout=60)
            await stream.read()
            running.send(signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            if again:
                running.send(signal.SIGTERM)
            read, ended = await to_the_end(stream)
            assert await running.ended() == 0
            assert ended is not None
            await eventually(lambda: running.events("stopped"), "logged")
            (stopped,) = running.events("stopped")
            assert (stopped["level"], stopped["cut"]) == ("warning" if again else "info", 1)
            if again:
                await eventually(lambda: worker.stats.live == 0)
            else:
                # What the worker had to say of it comes first; it is no success all the same.
                assert [end.finish_reason for end in completes(read)] == ["abort"]
                assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
                assert ended.retry_after is not None
                assert worker.stats.aborted == 1
    finally:
        await worker.stop(0)


@pytest.mark.parametrize("again", [False, True], ids=["limit", "second signal"])
async def test_requests_that_nobody_ends_are_told_why_they_end(again: bool) -> None:
    """One at a worker that heeds no Abort, one whose media are still on their way."""
    worker = SimWorker(SimOptions(faults=("Abort: hang",)))
    await worker.start("127.0.0.1:0")
    asked, over = asyncio.Event(), asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        asked.set()
        await over.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/x.png", silent)
    try:
        async with (
            TestServer(app) as host,
            router(
                *("--worker", worker.address, "--drain-timeout", "1h" if again else "100ms"),
                *("--mm-processing", "router", "--media-allow-private-hosts"),
            ) as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            stub = VllmEngineStub(channel)
            await eventually(lambda: running.events("worker_state")[-1]["state"] == "ready")
            calls = [
                stub.Generate(tokenized("[[sim: hang]]"), timeout=60),
                stub.Generate(seeing(PICTURE, str(host.make_url("/x.png"))), timeout=60),
            ]
            ends = [asyncio.create_task(refusal_of(drained(call))) for call in calls]
            await eventually(lambda: worker.stats.live == 1)
            await asked.wait()
            running.send(signal.SIGTERM)
            if again:
                await eventually(lambda: running.events("draining"))
                running.send(signal.SIGTERM)
            for end in ends:
                refused = await end
                assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
                assert refused.retry_after is not None
            assert await running.ended() == 0
            over.set()
            await eventually(lambda: worker.stats.live == 0)
        ended = [(line["outcome"], line["reason"]) for line in running.events("request")]
        assert ended == [("unavailable", "draining")] * 2
    finally:
        await worker.stop(0)


async def test_a_collector_that_does_not_answer_does_not_hold_up_the_end() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    collector = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with collector:
        port = collector.sockets[0].getsockname()[1]
        async with (
            router("--sim", "1", "--otlp-endpoint", f"http://127.0.0.1:{port}") as running,
            grpc.aio.insecure_channel(running.address) as channel,
        ):
            stub = VllmEngineStub(channel)
            await eventually(lambda: running.events("worker_state")[-1]["state"] == "ready")
            await drained(stub.Generate(tokenized("x"), timeout=30))
            running.send(signal.SIGTERM)
            assert await running.ended() == 0
        # The library's thread gives up only after 10 s, which nobody waits for.
        assert running.events("spans_lost")
        assert running.events("exit_held_up")
        assert not running.events("text")
