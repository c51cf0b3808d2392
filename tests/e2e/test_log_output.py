"""Whatever becomes of the log: a router in a process of its own serves on, and ends in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import grpc
import pytest

from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from tests.e2e.processes import START
from tests.serving import PATIENCE, tokenized
from workers.sim import SimOptions, SimWorker

# What stands as standard error; and what is done to it once the router serves.
Output = tuple[int | None, Callable[[], None]]


def closed() -> Output:
    return None, lambda: None


def full_disk() -> Output:
    full = os.open("/dev/full", os.O_WRONLY)
    return full, lambda: os.close(full)


def left_by_its_reader() -> Output:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    def leave() -> None:
        os.close(reader)
        os.close(writer)

    return writer, leave


def not_read() -> Output:
    reader, writer = os.pipe()
    assert reader  # stays open, and nobody reads it
    # Not before the router writes it: full from the beginning, but for one line.
    os.set_blocking(writer, False)
    os.write(writer, b"\n" * ((1 << 16) - 4096))
    os.set_blocking(writer, True)
    return writer, lambda: None


@asynccontextmanager
async def _serve(
    output: int | None, stdout: int, *args: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, str]]:
    """The process, and its addresses for gRPC and HTTP once it is ready."""
    # Its log, which would tell the ports it took, is what fails here.
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        listen, http = (f"127.0.0.1:{s.getsockname()[1]}" for s in (one, other))
    command = [sys.executable, "-m", "router", "serve", "--listen", listen, "--http", http, *args]
    process = await asyncio.create_subprocess_exec(
        *(("sh", "-c", 'exec "$@" 2>&-', "sh") if output is None else ()),
        *command,
        stdout=stdout,
        stderr=output,
    )
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(START):
            while not await _ready(session, http):
                assert process.returncode is None, "it has ended"
                await asyncio.sleep(0.05)
        yield process, listen, http
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready(session: aiohttp.ClientSession, http: str) -> bool:
    try:
        async with session.get(f"http://{http}/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("what", [closed, full_disk, left_by_its_reader, not_read])
async def test_requests_do_not_depend_on_the_log(
    what: Callable[[], Output], processes: int
) -> None:
    output, disturb = what()
    worker = SimWorker(SimOptions())
    address = await worker.start("127.0.0.1:0")
    args = ("--worker", address, "--log-level", "debug", "--processes", str(processes))
    try:
        async with _serve(output, asyncio.subprocess.DEVNULL, *args) as (process, listen, http):
            disturb()
            async with grpc.aio.insecure_channel(listen) as channel:
                for _ in range(20):
                    call = VllmEngineStub(channel).Generate(tokenized("hello"), timeout=PATIENCE)
                    assert [r.HasField("complete") async for r in call] == [True]
            if processes == 1 and output is not None and what is not not_read:
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(f"http://{http}/metrics") as answer,
                ):
                    text = await answer.text()
                (lost,) = (
                    float(line.split()[1])
                    for line in text.splitlines()
                    if line.startswith("router_log_lines_lost_total ")
                )
                assert lost >= 20
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE):
                assert await process.wait() == 0
    finally:
        await worker.stop(0)


async def test_an_announcement_that_nobody_takes_keeps_no_router_from_serving() -> None:
    worker = SimWorker(SimOptions())
    address = await worker.start("127.0.0.1:0")
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        given = (asyncio.subprocess.DEVNULL, full, "--worker", address)
        async with _serve(*given) as (process, listen, _):
            async with grpc.aio.insecure_channel(listen) as channel:
                call = VllmEngineStub(channel).Generate(tokenized("hello"), timeout=PATIENCE)
                assert [r.HasField("complete") async for r in call] == [True]
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE):
                assert await process.wait() == 0
    finally:
        os.close(full)
        await worker.stop(0)
