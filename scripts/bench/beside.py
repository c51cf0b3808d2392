"""A text stream and health checks beside 32 pictures of 12 megapixels.

`mmrouter serve` in a process of its own, before two simulated workers, one for
text and one that takes tensors. A client reads a text stream of one token every
10 ms and another asks for health, first alone, then while 32 requests with a
12-MP JPEG each are preprocessed in the router. What is told is the worst gap of
the stream and the worst answer of the health service, each beside the same
without pictures in the same run. With --shm the tensors go through shared
memory. Everything runs on loopback and stops by itself.

    python scripts/bench/beside.py [--pictures 32] [--seconds 8] [--shm]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from relay import process, wait_serving

from router.request.shm import namespace_id
from router.wire import ENGINE_SERVICE, common, engine, vllm_engine_pb2_grpc

PICTURE = Path(__file__).resolve().parents[2] / "tests/data/images/photo_4032x3024.jpg"
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
]
_TEXT, _PICTURES = "text", "pictures"
_VISION_START, _IMAGE_PAD, _VISION_END = 151652, 151655, 151653


@dataclass
class Seen:
    """Milliseconds between messages of the stream, and of each health check."""

    gaps: list[float] = field(default_factory=list)
    checks: list[float] = field(default_factory=list)

    def line(self, name: str) -> str:
        return (
            f"{name:34} stream gap: median {median(self.gaps):6.1f} ms, worst "
            f"{max(self.gaps):6.1f} ms | health: median {median(self.checks):5.1f} ms, worst "
            f"{max(self.checks):6.1f} ms"
        )


async def watch(address: str, done: asyncio.Event) -> Seen:
    """Reads a stream and asks for health until `done`."""
    seen = Seen()
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        await asyncio.gather(_read(channel, done, seen), _check(channel, done, seen))
    return seen


async def _read(channel: grpc.aio.Channel, done: asyncio.Event, seen: Seen) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    call = stub.Generate(
        engine.GenerateRequest(
            tokenized=engine.TokenizedInput(input_ids=range(32, 96)),
            sampling_params=engine.SamplingParams(max_tokens=100_000, ignore_eos=True),
            stream=True,
            router=engine.RouterOptions(model=_TEXT),
        )
    )
    last = None
    async for _ in call:
        now = time.perf_counter()
        if last is not None:
            seen.gaps.append((now - last) * 1e3)
        last = now
        if done.is_set():
            break
    call.cancel()


async def _check(channel: grpc.aio.Channel, done: asyncio.Event, seen: Seen) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    while not done.is_set():
        began = time.perf_counter()
        await stub.Check(health_pb2.HealthCheckRequest(service=ENGINE_SERVICE))
        seen.checks.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(0.02)


async def send_picture(address: str, number: int) -> None:
    """One request with a picture that no cache has: a comment makes it another file."""
    jpeg = PICTURE.read_bytes()
    comment = f"number {number} of {os.getpid()}".encode()
    marked = jpeg[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + jpeg[2:]
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        request = engine.GenerateRequest(
            tokenized=engine.TokenizedInput(
                input_ids=[_VISION_START, _IMAGE_PAD, _VISION_END, 104, 105]
            ),
            sampling_params=engine.SamplingParams(max_tokens=4),
            router=engine.RouterOptions(model=_PICTURES),
            media_refs=engine.MediaRefs(
                items=[engine.MediaRef(modality=common.Modality.IMAGE, data=marked)]
            ),
        )
        async for _ in stub.Generate(request, timeout=300):
            pass


async def measure(address: str, arguments: argparse.Namespace) -> None:
    await wait_serving(address)
    await send_picture(address, -1)
    done = asyncio.Event()
    alone = asyncio.create_task(watch(address, done))
    await asyncio.sleep(arguments.seconds)
    done.set()
    quiet = await alone
    done = asyncio.Event()
    beside = asyncio.create_task(watch(address, done))
    await asyncio.sleep(0.5)
    began = time.perf_counter()
    await asyncio.gather(*(send_picture(address, n) for n in range(arguments.pictures)))
    took = time.perf_counter() - began
    done.set()
    busy = await beside
    print(
        f"{date.today()}, {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, grpcio {grpc.__version__}, load {os.getloadavg()[0]:.1f}"
    )
    print(quiet.line("alone"))
    print(busy.line(f"beside {arguments.pictures} pictures of 12 MP"))
    print(f"the pictures took {took:.1f} s, {arguments.pictures / took:.1f} a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--shm", action="store_true")
    arguments = parser.parse_args()
    sim = (sys.executable, "-m", "router", "sim", "--listen", "127.0.0.1:0")
    serve = (sys.executable, "-m", "router", "serve", "--listen", "127.0.0.1:0", "--http", "")
    # 32 tensors of 73 MB at once are more than the default budget lets in.
    serve += ("--media-budget-bytes", "8GiB")
    # And one simulated worker, which takes each picture apart, cannot answer anybody meanwhile.
    serve += ("--health-timeout", "60s")
    with ExitStack() as stack:
        # The stream has a worker of its own: the other one's trouble is not the router's.
        slow = ("--served-model", _TEXT, "--time-per-output-token", "10ms")
        off = ("--served-model", _PICTURES, "--mm-processor", "off")
        if arguments.shm:
            off += ("--shm-namespace-id", namespace_id())
        _, text = stack.enter_context(process(*sim, *slow))
        _, pictures = stack.enter_context(process(*sim, *off))
        _, router = stack.enter_context(process(*serve, "--worker", f"{text},{pictures}"))
        asyncio.run(measure(router, arguments))


if __name__ == "__main__":
    main()
