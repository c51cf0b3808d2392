"""What a router keeps of requests that are gone: it should be nothing.

Through one `mmrouter serve` go streams that their clients leave after the
first chunk, pictures (each another one, tensors through shared memory), and
pictures that cannot be fetched. A tenth of each goes first, to warm up; what
has grown after the rest is told, and the exit code is 1 when something is left.

    python scripts/bench/soak.py [--streams 20000] [--images 5000] [--failures 2000]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
from images import SERVE, SIM, another, free_port
from relay import process, wait_serving

from router.request.shm import ROOT, namespace_id
from router.wire import common, engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from workers.sim.tokenizer import encode

PICTURE = "photo_640x480.jpg"
PROMPT = encode("<|vision_start|><|image_pad|><|vision_end|>what?")
# What an allocator may hold on to for reasons of its own.
ALLOWED_GROWTH = 30 << 20
SETTLE = 3.0

Act = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Held:
    """What a process holds: bytes of memory, open files, shared segments, requests and leases."""

    memory: int
    files: int
    threads: int
    segments: int
    requests: int
    leases: int

    @classmethod
    def by(cls, pid: int, http: str) -> Held:
        status = Path(f"/proc/{pid}/status").read_text()
        return cls(
            memory=int(_found(r"VmRSS:\s+(\d+)", status)) << 10,
            files=len(list(Path(f"/proc/{pid}/fd").iterdir())),
            threads=int(_found(r"Threads:\s+(\d+)", status)),
            segments=sum(1 for path in ROOT.glob("mmrouter-*") if path.suffix != ".lock"),
            requests=_gauge(http, "router_requests_in_flight"),
            leases=_gauge(http, "router_worker_in_flight"),
        )


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None
    return found[1]


def _gauge(http: str, name: str) -> int:
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(
        sum(float(line.rpartition(" ")[2]) for line in lines if re.match(name + r"[ {]", line))
    )


# -- What is done to it


def leaving(stub: VllmEngineStub) -> Act:
    """Takes one chunk of a stream, and leaves."""

    async def act() -> None:
        request = engine.GenerateRequest(
            tokenized=engine.TokenizedInput(input_ids=encode("[[sim: hang-after-chunks=1]]")),
            stream=True,
        )
        call = stub.Generate(request, timeout=60)
        await call.read()
        call.cancel()

    return act


def looking(stub: VllmEngineStub, url: Callable[[], str], expected: grpc.StatusCode) -> Act:
    """Asks about a picture, to the end."""

    async def act() -> None:
        request = engine.GenerateRequest(
            tokenized=engine.TokenizedInput(input_ids=PROMPT),
            sampling_params=engine.SamplingParams(max_tokens=2),
        )
        request.media_refs.items.add(modality=common.IMAGE, url=url())
        code = grpc.StatusCode.OK
        try:
            async for _ in stub.Generate(request, timeout=60):
                pass
        except grpc.aio.AioRpcError as error:
            code = error.code()
        assert code is expected, f"{code} instead of {expected}"

    return act


async def repeat(act: Act, times: int, at_once: int) -> float:
    """Does it so many times; how many times a second."""
    left: Iterator[int] = iter(range(times))

    async def one() -> None:
        for _ in left:
            await act()

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(at_once)))
    return times / (time.monotonic() - began) if times else 0.0


async def soak(address: str, pid: int, http: str, arguments: argparse.Namespace) -> bool:
    """Whether nothing is left."""
    host = await asyncio.start_server(_not_found, "127.0.0.1", 0)
    missing = "http://{}:{}/{}.jpg".format(*host.sockets[0].getsockname(), "{}")
    serial = iter(range(1 << 40))
    async with host, grpc.aio.insecure_channel(address) as channel:
        stub = VllmEngineStub(channel)
        acts = (
            ("streams left after a chunk", leaving(stub), arguments.streams),
            (
                "pictures",
                looking(stub, lambda: another(PICTURE), grpc.StatusCode.OK),
                arguments.images,
            ),
            (
                "failed fetches",
                looking(
                    stub,
                    lambda: missing.format(next(serial)),
                    grpc.StatusCode.INVALID_ARGUMENT,
                ),
                arguments.failures,
            ),
        )
        for _, act, times in acts:
            await repeat(act, times // 10, arguments.at_once)
        await asyncio.sleep(SETTLE)
        before = await asyncio.to_thread(Held.by, pid, http)
        print(f"after warm-up: {before}")
        for name, act, times in acts:
            rate = await repeat(act, times, arguments.at_once)
            held = await asyncio.to_thread(Held.by, pid, http)
            print(f"{times:6} {name:28} {rate:6.0f} a second; {held.memory >> 20} MiB")
    await asyncio.sleep(SETTLE)
    after = await asyncio.to_thread(Held.by, pid, http)
    print(f"at the end:    {after}")
    grown = after.memory - before.memory
    print(f"memory grew by {grown / 2**20:.1f} MiB")
    # The clients' own connection is gone, so there is one open file less.
    nothing = not (after.segments or after.requests or after.leases) and after.files <= before.files
    return nothing and grown < ALLOWED_GROWTH


async def _not_found(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the router has let go of it
    finally:
        writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=20_000)
    parser.add_argument("--images", type=int, default=5_000)
    parser.add_argument("--failures", type=int, default=2_000)
    parser.add_argument("--at-once", type=int, default=16)
    arguments = parser.parse_args()
    http = f"127.0.0.1:{free_port()}"
    flags = ("--log-level", "error", "--mm-processing", "router", "--media-cache-bytes", "16MiB")
    fetching = ("--media-allow-private-hosts", "--shm-min-bytes", "1KiB")
    patient = ("--health-timeout", "30s", "--worker-wait", "30s")
    with ExitStack() as stack:
        sim = (*SIM, "--shm-namespace-id", namespace_id())
        _, worker = stack.enter_context(process(*sim))
        serve = (*SERVE, "--http", http, "--worker", worker, *flags, *fetching, *patient)
        pid, address = stack.enter_context(process(*serve))
        asyncio.run(wait_serving(address))
        clean = asyncio.run(soak(address, pid, http, arguments))
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
