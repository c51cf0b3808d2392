"""What the router costs over a bare relay of raw bytes.

One worker that answers from memory, in a process of its own; before it, in
turn and in the same run, (a) a grpc.aio relay of twenty lines that passes raw
bytes on, on asyncio's own event loop and, to be fair, on the router's, and (b)
`mmrouter serve`, with and without metrics and log lines.
Clients open streams through each. What is compared is the CPU time of the
process in the middle, per request and per streamed message, found by a
least-squares fit over streams of different length. Everything runs on loopback
and stops by itself.

    python scripts/bench/relay.py [--rounds 5] [--streams 32] [--requests 256]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import grpc
import uvloop
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from router.cli import run
from router.wire import ENGINE_SERVICE, common, engine

LENGTHS = (16, 64, 256)
BARE = "bare relay"
BARE_UVLOOP = "bare relay, on uvloop"
UNCOUNTED = "mmrouter, metrics that do nothing"
COUNTED = "mmrouter"
LOGGED = "mmrouter, a log line a request"
# What telling costs: with it against without it.
TOLD = {
    "metrics on against off": (COUNTED, UNCOUNTED),
    "log line on against off": (LOGGED, COUNTED),
}
# Message for message: merged ones would make the router look cheaper than it is.
SERVE = ("serve", "--listen", "127.0.0.1:0", "--http", "", "--no-merge-chunks")
METHOD = f"/{ENGINE_SERVICE}/Generate"
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.so_reuseport", 0)]


# -- The processes


async def serve_worker() -> None:
    """A worker whose answers cost next to nothing: one chunk object, sent again and again."""
    chunk = _chunk()
    complete = engine.GenerateResponse(
        complete=engine.GenerateComplete(output_ids=[7], finish_reason="length", prompt_tokens=64)
    ).SerializeToString()

    async def generate(raw: bytes, context: grpc.aio.ServicerContext) -> None:
        request = engine.GenerateRequest.FromString(raw)
        for _ in range(request.sampling_params.max_tokens - 1):
            await context.write(chunk)
        await context.write(complete)

    await serve_bare(generate)


Generate = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[None]]


async def serve_bare(generate: Generate) -> None:
    """A text worker that answers as `generate` does, and knows just enough to be taken for one."""

    def answer(message: Message):  # type: ignore[no-untyped-def]
        async def handler(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return message.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(handler)

    async def tokenizer(raw: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.write(common.GetTokenizerChunk(data=_EMPTY_ZIP).SerializeToString())

    server = grpc.aio.server(options=OPTIONS)
    methods = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
        "GetModelInfo": answer(engine.GetModelInfoResponse(served_model_name="bench")),
        "GetServerInfo": answer(engine.GetServerInfoResponse()),
        "GetLoads": answer(engine.GetLoadsResponse(loads=[engine.SchedulerLoad()])),
        "GetTokenizer": grpc.unary_stream_rpc_method_handler(tokenizer),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(ENGINE_SERVICE, methods),)
    )
    await _serve_health(server)
    await _announce(server)


async def serve_relay(worker: str) -> None:
    """The baseline: raw bytes in, raw bytes out, nothing else."""
    channel = grpc.aio.insecure_channel(worker, options=OPTIONS)
    upstream = channel.unary_stream(METHOD)

    async def generate(raw: bytes, context: grpc.aio.ServicerContext) -> None:
        async for message in upstream(raw):
            await context.write(message)

    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.unary_stream_rpc_method_handler(generate)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(ENGINE_SERVICE, {"Generate": handler}),)
    )
    await _serve_health(server)
    await _announce(server)


async def _serve_health(server: grpc.aio.Server) -> None:
    async def check(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return health_pb2.HealthCheckResponse(status="SERVING").SerializeToString()

    handler = grpc.unary_unary_rpc_method_handler(check)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler}),)
    )


def serve_uncounted(worker: str) -> None:
    """mmrouter as it would be without metrics and log lines: every series is one that ignores."""
    MetricWrapperBase.labels = lambda self, *values, **named: self
    for kind, methods in ((Counter, ("inc",)), (Gauge, ("inc", "dec")), (Histogram, ("observe",))):
        for method in methods:
            setattr(kind, method, lambda self, *value: None)
    run([*SERVE, "--worker", worker, "--log-level", "warning"])


async def _announce(server: grpc.aio.Server) -> None:
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def _chunk() -> bytes:
    chunk = engine.GenerateStreamChunk(token_ids=[4711], prompt_tokens=64, completion_tokens=1)
    return engine.GenerateResponse(chunk=chunk).SerializeToString()


_EMPTY_ZIP = b"PK\x05\x06" + bytes(18)


@contextmanager
def process(*command: str) -> Iterator[tuple[int, str]]:
    """Runs a process that prints `listening on HOST:PORT`; gives its id and address."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line.startswith("listening on "):
            raise RuntimeError(f"{command[0]} did not start")
        yield child.pid, line.split()[-1]
    finally:
        child.terminate()
        child.wait(10)


# -- The measurement


def cpu_seconds(pid: int) -> float:
    """Time on a CPU of a process so far, all of its living threads, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def drive(address: str, length: int, requests: int, streams: int) -> None:
    """`requests` streams of `length` messages, `streams` at once."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        call = channel.unary_stream(METHOD)
        request = engine.GenerateRequest(
            request_id="bench",
            tokenized=engine.TokenizedInput(input_ids=range(64)),
            sampling_params=engine.SamplingParams(max_tokens=length),
            stream=True,
        ).SerializeToString()
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                count = 0
                async for _message in call(request):
                    count += 1
                assert count == length, f"{count} of {length} messages came"

        await asyncio.gather(*(client() for _ in range(streams)))


async def wait_serving(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(200):
            request = health_pb2.HealthCheckRequest(service=ENGINE_SERVICE)
            answer = await stub.Check(request, wait_for_ready=True, timeout=30)
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            await asyncio.sleep(0.1)
    raise RuntimeError("the router is not ready")


def fit(costs: dict[int, float]) -> tuple[float, float]:
    """(per request, per message) from the cost of a request at each length."""
    mean_x = statistics.fmean(costs)
    mean_y = statistics.fmean(costs.values())
    slope = sum((x - mean_x) * (y - mean_y) for x, y in costs.items()) / sum(
        (x - mean_x) ** 2 for x in costs
    )
    return mean_y - slope * mean_x, slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--role", choices=("worker", "relay", "uvloop", "uncounted"), help=argparse.SUPPRESS
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "worker":
        asyncio.run(serve_worker())
    elif arguments.role == "relay":
        asyncio.run(serve_relay(arguments.worker))
    elif arguments.role == "uvloop":
        uvloop.run(serve_relay(arguments.worker))
    elif arguments.role == "uncounted":
        serve_uncounted(arguments.worker)
    else:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    me = (sys.executable, __file__, "--role")
    serve = (sys.executable, "-m", "router", *SERVE)
    with (
        process(*me, "worker") as (_, worker),
        process(*me, "relay", "--worker", worker) as (relay_pid, relay),
        process(*me, "uvloop", "--worker", worker) as (uvloop_pid, on_uvloop),
        process(*me, "uncounted", "--worker", worker) as (uncounted_pid, uncounted),
        process(*serve, "--worker", worker, "--log-level", "warning") as (router_pid, router),
        process(*serve, "--worker", worker) as (logging_pid, logging),
    ):
        targets = {
            BARE: (relay_pid, relay),
            BARE_UVLOOP: (uvloop_pid, on_uvloop),
            UNCOUNTED: (uncounted_pid, uncounted),
            COUNTED: (router_pid, router),
            LOGGED: (logging_pid, logging),
        }
        costs: dict[str, dict[int, list[float]]] = {
            name: {length: [] for length in LENGTHS} for name in targets
        }
        for _, address in targets.values():
            asyncio.run(wait_serving(address))
            asyncio.run(drive(address, 16, 64, arguments.streams))
        for _ in range(arguments.rounds):
            for length in LENGTHS:
                for name, (pid, address) in targets.items():
                    before = cpu_seconds(pid)
                    asyncio.run(drive(address, length, arguments.requests, arguments.streams))
                    spent = cpu_seconds(pid) - before
                    costs[name][length].append(spent / arguments.requests)
    report(costs, arguments)


def report(costs: dict[str, dict[int, list[float]]], arguments: argparse.Namespace) -> None:
    """Medians over rounds of each round's ratio, so that a noisy round counts once."""
    print(
        f"{date.today()}, {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, grpcio {importlib.metadata.version('grpcio')}; "
        f"{arguments.streams} streams at once, {arguments.requests} requests a point, "
        f"{arguments.rounds} rounds; CPU time of the process in the middle"
    )
    base = costs[BARE]
    for name, cost in costs.items():
        cells = []
        for length in LENGTHS:
            ratio = _ratio(cost[length], base[length])
            micros = statistics.median(cost[length]) * 1e6
            cells.append(f"{length} messages {micros:6.0f} us x{ratio:.2f}")
        slopes = [
            fit({x: cost[x][i] for x in LENGTHS})[1] / fit({x: base[x][i] for x in LENGTHS})[1]
            for i in range(arguments.rounds)
        ]
        print(f"{name:33} {' | '.join(cells)} | one more message x{statistics.median(slopes):.2f}")
    for what, (on, off) in TOLD.items():
        cells = [
            f"{length} messages x{_ratio(costs[on][length], costs[off][length]):.2f}"
            for length in LENGTHS
        ]
        print(f"{what:33} {' | '.join(cells)}")


def _ratio(costs: list[float], base: list[float]) -> float:
    """The median over rounds of each round's ratio."""
    return statistics.median(a / b for a, b in zip(costs, base, strict=True))


if __name__ == "__main__":
    main()
