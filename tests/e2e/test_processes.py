"""`mmrouter serve --processes 2`: two processes, and one router to everybody."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.wire import admin, engine
from router.wire.router_pb2_grpc import RouterAdminStub
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from tests.e2e.processes import Running, mmrouter
from tests.serving import completes, eventually, hold_answers, streamed, tokenized
from workers.sim import SimOptions, SimWorker

# Starts, replacements and what they depend on; seconds on a machine at rest.
PATIENCE = 180.0
pytestmark = pytest.mark.timeout(600)
HANGS = "[[sim: hang-after-chunks=1]]"


@dataclass
class Supervised:
    """The router, and a connection to each of its processes."""

    running: Running
    web: aiohttp.ClientSession
    http: str
    channels: dict[int, grpc.aio.Channel]
    # Requests that have ended.
    requests: int = 0

    async def get(self, path: str) -> tuple[int, str]:
        async with self.web.get(f"http://{self.http}{path}") as answer:
            return answer.status, await answer.text()

    async def until(self, path: str, wanted: Callable[[int, str], bool]) -> None:
        """Asks until the answer is as wanted."""
        async with asyncio.timeout(PATIENCE):
            while not wanted(*await self.get(path)):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)

    async def total(self, name: str) -> float:
        """The sum of a metric's samples."""
        _, text = await self.get("/metrics")
        families = text_string_to_metric_families(text)
        return sum(s.value for f in families for s in f.samples if s.name == name)

    async def pid(self, number: int) -> int:
        _, page = await self.get("/statusz")
        told = re.search(rf'/statusz/{number}">.*?data-label="PID"><div>(\d+)', page)
        assert told, page
        return int(told[1])

    def process_of(self, request_id: str) -> int | None:
        """Which process logged the end of a request."""
        for line in self.running.events("request"):
            if line["request"] == request_id:
                return int(line["process"])
        return None

    async def ask(self, channel: grpc.aio.Channel) -> int:
        """One request; the number of the process that served it."""
        self.requests += 1
        request_id = f"asked {self.requests}"
        call = VllmEngineStub(channel).Generate(
            tokenized("x", request_id, max_tokens=1), timeout=30
        )
        async for _ in call:
            pass
        await eventually(lambda: self.process_of(request_id) is not None)
        number = self.process_of(request_id)
        assert number is not None
        return number

    async def connect(self, stack: AsyncExitStack) -> None:
        """Connects until there is a connection to each process; the kernel draws."""
        for _ in range(100):
            channel = await stack.enter_async_context(new_channel(self.running.address))
            self.channels.setdefault(await self.ask(channel), channel)
            if len(self.channels) == 2:
                return
        raise AssertionError("a hundred connections went to one process")


def new_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


@asynccontextmanager
async def supervised(*args: str) -> AsyncIterator[Supervised]:
    """Two processes, ready, with a connection to each."""
    faces = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--health-interval", "100ms")
    async with (
        AsyncExitStack() as stack,
        mmrouter("serve", "--processes", "2", *faces, *args, start=PATIENCE) as running,
        aiohttp.ClientSession() as web,
    ):
        await eventually(lambda: running.events("supervising"))
        router = Supervised(running, web, running.events("supervising")[0]["http"], {})
        await router.until("/readyz", lambda status, _: status == 200)
        await router.connect(stack)
        yield router


@asynccontextmanager
async def simulated(*options: SimOptions) -> AsyncIterator[list[SimWorker]]:
    workers = [SimWorker(each) for each in options]
    for worker in workers:
        await worker.start("127.0.0.1:0")
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.stop(0)


async def rest_of(call: Any) -> list[Any]:
    read = []
    while (response := await call.read()) is not grpc.aio.EOF:
        read.append(response)
    return read


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def folder_of(pid: int) -> Path:
    """Where a process' sockets are."""
    sockets = Path("/proc/net/unix").read_text()
    own = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    for line in sockets.splitlines():
        match line.split():
            case [*_, inode, path] if f"socket:[{inode}]" in own and path.endswith(".http"):
                return Path(path).parent
    raise AssertionError("it has no socket")


async def test_two_processes_are_one_router() -> None:
    async with (
        simulated(SimOptions(), SimOptions()) as (first, second),
        supervised("--worker", first.address, "--drain-timeout", "1h") as router,
    ):
        for channel in router.channels.values():
            await router.ask(channel)
        for name in ("router_requests_total", "router_request_seconds_count"):
            assert await router.total(name) == router.requests
        assert await router.total("router_processes") == 2

        # What operators say to one, both do.
        operator = RouterAdminStub(router.channels[0])
        await operator.AddWorker(admin.AddWorkerRequest(address=second.address), timeout=20)
        for number in (0, 1):
            await router.until(f"/statusz/{number}", lambda _, page: second.address in page)
        shown = (await operator.ListWorkers(admin.ListWorkersRequest(), timeout=20)).workers
        assert [w.address for w in shown] == [first.address, second.address]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await operator.AddWorker(admin.AddWorkerRequest(address=second.address), timeout=20)
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        await operator.RemoveWorker(admin.RemoveWorkerRequest(address=second.address), timeout=20)
        for number in (0, 1):
            await router.until(f"/statusz/{number}", lambda _, page: second.address not in page)

        # A stream of one process, aborted through the other.
        stubs = {number: VllmEngineStub(channel) for number, channel in router.channels.items()}
        held = stubs[0].Generate(streamed(HANGS, "held"), timeout=60)
        await held.read()
        assert await router.total("router_requests_in_flight") == 1
        await stubs[1].Abort(engine.AbortRequest(request_ids=["held"]), timeout=20)
        assert [end.finish_reason for end in completes(await rest_of(held))] == ["abort"]

        # One is done at once, the other gets the time that it needs.
        folder = folder_of(await router.pid(0))
        assert len(list(folder.iterdir())) == 4
        go_on = hold_answers(first)
        stream = stubs[1].Generate(streamed("x", max_tokens=40), timeout=200)
        first_output = await stream.read()
        idle = await router.pid(0)
        router.running.send(signal.SIGTERM)
        await router.until("/readyz", lambda *told: told == (503, "the router is stopping\n"))
        await eventually(lambda: not alive(idle))
        assert not stream.done(), "it lasts until the other has ended"
        go_on.set()
        assert len(completes([first_output, *await rest_of(stream)])) == 1
        assert await router.running.ended() == 0
        assert not folder.exists()
        assert not router.running.events("process_ended")


async def test_a_process_that_is_killed_is_replaced_while_the_other_serves() -> None:
    async with (
        simulated(SimOptions(), SimOptions()) as (first, second),
        supervised("--worker", first.address) as router,
    ):
        operator = RouterAdminStub(router.channels[1])
        await operator.AddWorker(admin.AddWorkerRequest(address=second.address), timeout=20)
        await operator.RemoveWorker(admin.RemoveWorkerRequest(address=first.address), timeout=20)
        await router.until("/readyz", lambda status, _: status == 200)
        held = VllmEngineStub(router.channels[1]).Generate(streamed(HANGS, "held"), timeout=200)
        await held.read()
        counted = await router.total("router_requests_total")
        assert counted == router.requests
        folder, killed = folder_of(await router.pid(0)), await router.pid(0)

        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: router.running.events("process_ended"))
        assert await router.ask(router.channels[1]) == 1
        # What takes connections is ready, with nobody in the dead one's place.
        await router.until("/readyz", lambda status, _: status == 200)
        assert not router.running.events("process_replaced")
        async with asyncio.timeout(PATIENCE):
            while not router.running.events("process_replaced"):
                now = await router.total("router_requests_total")
                assert now >= counted
                counted = now
                # The successor starts on the same cores.
                await asyncio.sleep(0.05)
        assert await router.total("router_process_restarts_total") == 1
        assert await router.total("router_requests_total") == router.requests
        assert await router.total("router_requests_in_flight") == 1
        assert await router.pid(0) != killed
        assert len(list(folder.iterdir())) == 4

        # It knows what its sibling was told.
        _, page = await router.get("/statusz/0")
        assert second.address in page
        assert first.address not in page
        await router.until("/readyz", lambda status, _: status == 200)

        # One that hangs is told of, and what it counted stays.
        frozen = await router.pid(0)
        os.kill(frozen, signal.SIGSTOP)
        await router.until("/livez", lambda *told: told == (503, "process 0 does not answer\n"))
        assert await router.total("router_requests_total") == router.requests
        os.kill(frozen, signal.SIGCONT)
        await router.until("/livez", lambda status, _: status == 200)

        # The stream beside all this has gone on.
        assert not held.done()
        abort = engine.AbortRequest(request_ids=["held"])
        await VllmEngineStub(router.channels[1]).Abort(abort, timeout=20)
        assert [end.finish_reason for end in completes(await rest_of(held))] == ["abort"]

        # Without a supervisor there are no processes for long.
        pids = [await router.pid(number) for number in (0, 1)]
        router.running.send(signal.SIGKILL)
        await eventually(lambda: not any(alive(pid) for pid in pids), timeout=PATIENCE)
        await eventually(lambda: not folder.exists())


@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        (["--sim", "1"], 2, "--sim runs workers inside a router"),
        (["--listen", "unix:/tmp/x"], 2, "--listen has to be HOST:PORT"),
        (["--admin-tokens", "/nowhere"], 1, "process 0 did not start: exit code 1"),
        (["--listen", "TAKEN"], 1, "cannot listen on 127.0.0.1:"),
        (["--http", "TAKEN"], 1, "cannot serve HTTP on 127.0.0.1:"),
    ],
)
async def test_what_cannot_start_says_why(flags: list[str], code: int, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        given = [address if flag == "TAKEN" else flag for flag in flags]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "router", "serve", "--processes", "2"),
            *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *given),
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(PATIENCE):
            _, told = await process.communicate()
    assert process.returncode == code
    assert why in told.decode()
