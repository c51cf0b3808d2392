"""What a picture costs the router that makes tensors of it.

`--clients` clients send pictures, one after the other, through `mmrouter serve
--mm-processing router` to a simulated worker that takes no references, checks
tensors and does not look at them; every process is one of its own, and every
picture another one, so that no cache helps. Told are, for each size: CPU time
of the router's process (and children) a request, the kernel's part of it,
requests per second, the longest delay of its event loop, peak memory, and where
the time goes. First so many pictures go through as its cache of tensors holds:
until it is full each takes memory that was never used before, and a router is
full for nearly all of its life. In turn, in the same run, the same pictures go
through one that hands tensors over in shared memory (`shm`), and through
`--gateway`, an OpenAI gateway (`smg`) that makes tensors for the same worker.

    python scripts/bench/images.py [--clients 4] [--rounds 3] [--gateway PATH/smg]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import grpc
from relay import cpu_seconds, process, wait_serving

from router.request.shm import namespace_id
from router.wire import common, engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from workers.sim.tokenizer import encode

IMAGES = Path(__file__).parents[2] / "tests" / "data" / "images"
# Name, file, requests a round, and how many fill 512 MiB with their tensors.
SIZES = (
    ("640x480", "photo_640x480.jpg", 48, 300),
    ("1920x1080", "photo_1920x1080.jpg", 24, 45),
    ("4032x3024", "photo_4032x3024.jpg", 8, 10),
)
SERVE = (sys.executable, "-m", "router", "serve", "--listen", "127.0.0.1:0")
SIM = (sys.executable, "-m", "router", "sim", "--listen", "127.0.0.1:0", "--mm-processor", "off")
BLIND = (sys.executable, __file__, "--role", "worker", *SIM[3:])
MODEL = "sim/Qwen3-VL"
PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>\n"
# A machine that is busy with pictures is no ill health here.
PATIENT = ("--health-timeout", "60s", "--health-failures", "20", "--worker-wait", "60s")
_LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_serial = itertools.count(1)

Ask = Callable[[str], Awaitable[None]]
# A client's connection, which it keeps, as clients do.
Connect = Callable[[], AbstractAsyncContextManager[Ask]]


def another(name: str) -> str:
    """The picture as a data URL that nobody has seen: its JPEG comment is new."""
    raw = (IMAGES / name).read_bytes()
    comment = f"{os.getpid()}-{next(_serial)}".encode()
    marker = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
    return "data:image/jpeg;base64," + base64.b64encode(raw[:2] + marker + raw[2:]).decode()


# -- What is asked of the process in the middle


@dataclass(frozen=True)
class Target:
    pid: int
    connect: Connect
    # Where its metrics are; empty where they are not ours.
    http: str = ""

    def cpu(self) -> float:
        """CPU seconds so far, children included."""
        return sum(cpu_seconds(pid) for pid in _family(self.pid))

    def kernel(self) -> float:
        """CPU seconds so far in the kernel, children included, in steps of 10 ms."""
        stats = (Path(f"/proc/{pid}/stat").read_text() for pid in _family(self.pid))
        ticks = sum(int(stat.rpartition(")")[2].split()[12]) for stat in stats)
        return ticks / os.sysconf("SC_CLK_TCK")

    def peak(self) -> int:
        """Most memory so far, in bytes, of its own process."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10  # type: ignore[index]

    def metrics(self) -> dict[str, float]:
        if not self.http:
            return {}
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(p for child in children for p in _family(int(child)))]


def through_grpc(address: str) -> Connect:
    ids = encode(PROMPT)

    async def ask(stub: VllmEngineStub, url: str) -> None:
        request = engine.GenerateRequest(
            tokenized=engine.TokenizedInput(input_ids=ids),
            sampling_params=engine.SamplingParams(max_tokens=4, temperature=0),
        )
        request.media_refs.items.add(modality=common.IMAGE, url=url)
        async for _ in stub.Generate(request, timeout=120):
            pass

    @asynccontextmanager
    async def connect() -> AsyncIterator[Ask]:
        async with grpc.aio.insecure_channel(address, options=_LARGE) as channel:
            yield partial(ask, VllmEngineStub(channel))

    return connect


def through_http(address: str) -> Connect:
    async def ask(connection: HTTPConnection, url: str) -> None:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": parts}],
            "temperature": 0,
            "max_tokens": 4,
        }
        await asyncio.to_thread(_post, connection, json.dumps(body).encode())

    @asynccontextmanager
    async def connect() -> AsyncIterator[Ask]:
        connection = HTTPConnection(address, timeout=120)
        try:
            yield partial(ask, connection)
        finally:
            connection.close()

    return connect


def _post(connection: HTTPConnection, body: bytes) -> None:
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    with connection.getresponse() as answer:
        told = json.load(answer)
        if answer.status != 200:
            raise OSError(f"HTTP {answer.status}: {told}")


# -- The processes


def blind_worker(command: list[str]) -> None:
    """A simulated worker that does all but look at pictures: the machine is the router's."""
    from router.cli import run
    from workers.sim import prompt
    from workers.sim.picture import Sight

    def look(_: object, grid: tuple[int, int, int], family: object, modality: str) -> Sight:
        return Sight(modality, 1, grid[2], grid[1], grid, (0, 0, 0), "unseen")

    prompt.levels = lambda values, *_: values
    prompt.look = look
    sys.exit(run(command))


@contextmanager
def router(worker: str, *flags: str) -> Iterator[Target]:
    http = f"127.0.0.1:{free_port()}"
    command = (*SERVE, "--http", http, "--worker", worker, "--log-level", "warning")
    with process(*command, "--mm-processing", "router", *PATIENT, *flags) as (pid, address):
        asyncio.run(wait_serving(address))
        yield Target(pid, through_grpc(address), http)


@contextmanager
def gateway(path: str, worker: str) -> Iterator[Target]:
    port = free_port()
    command = [path, "launch", "--worker-urls", f"grpc://{worker}", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--mm-processing", "router", "--log-level", "warn"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    target = Target(child.pid, through_http(f"127.0.0.1:{port}"))
    try:
        for _ in range(60):
            try:
                play(target, SIZES[0][1], 1, 1)
                break
            except OSError:
                time.sleep(0.5)
        else:
            raise RuntimeError("the gateway answers no picture")
        yield target
    finally:
        child.terminate()
        child.wait(20)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- The measurement


@dataclass
class Round:
    """`cpu` and, of it, `kernel` in ms a request, `latency` the median in ms, `lag` in ms.

    `stages` are in ms an item.
    """

    cpu: float
    kernel: float
    rate: float
    latency: float
    lag: float
    stages: dict[str, float]


def play(target: Target, name: str, requests: int, clients: int) -> Round:
    """Sends so many pictures with so many clients."""
    urls = iter([another(name) for _ in range(requests)])
    taken: list[float] = []

    async def client() -> None:
        async with target.connect() as ask:
            for url in urls:
                began = time.monotonic()
                await ask(url)
                taken.append(time.monotonic() - began)

    async def all_clients() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    metrics, cpu, kernel = target.metrics(), target.cpu(), target.kernel()
    began = time.monotonic()
    asyncio.run(all_clients())
    seconds, cpu, kernel = time.monotonic() - began, target.cpu() - cpu, target.kernel() - kernel
    after = target.metrics()
    grown = {name: value - metrics.get(name, 0.0) for name, value in after.items()}
    return Round(
        cpu=cpu / requests * 1e3,
        kernel=kernel / requests * 1e3,
        rate=requests / seconds,
        latency=statistics.median(taken) * 1e3,
        lag=_worst(grown) * 1e3,
        stages=_stages(grown),
    )


def _worst(grown: dict[str, float]) -> float:
    """The upper bound, in seconds, of the bucket with the longest delay of the loop."""
    bounds = {
        float(name.split('"')[1]): count
        for name, count in grown.items()
        if name.startswith("router_loop_lag_seconds_bucket")
    }
    total = max(bounds.values(), default=0.0)
    return min((bound for bound, count in bounds.items() if count == total), default=0.0)


def _stages(grown: dict[str, float]) -> dict[str, float]:
    stages = {}
    for name, value in grown.items():
        if found := re.fullmatch(r'router_media_stage_seconds_sum\{stage="(\w+)"\}', name):
            count = grown[name.replace("_sum", "_count")]
            stages[found[1]] = value / count * 1e3 if count else 0.0
    fetches = grown.get("router_media_fetch_seconds_count", 0.0)
    if fetches:
        stages["unpack"] = grown["router_media_fetch_seconds_sum"] / fetches * 1e3
    return stages


def measure(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        _, worker = stack.enter_context(process(*BLIND, "--shm-namespace-id", namespace_id()))
        targets = {"mmrouter": stack.enter_context(router(worker, "--shm", "off"))}
        targets["shm"] = stack.enter_context(router(worker, "--shm", "auto"))
        if arguments.gateway:
            try:
                targets["smg"] = stack.enter_context(gateway(arguments.gateway, worker))
            except (OSError, RuntimeError) as error:
                print(f"without the gateway: {error}")
        else:
            print("without a gateway to compare with: --gateway names none")
        for label, name, requests, fill in SIZES:
            compare(label, name, requests, fill, targets, arguments)


def compare(
    label: str,
    name: str,
    requests: int,
    fill: int,
    targets: dict[str, Target],
    arguments: argparse.Namespace,
) -> None:
    rounds: dict[str, list[Round]] = {who: [] for who in targets}
    for target in targets.values():
        play(target, name, fill if target.http else requests, arguments.clients)
    for _ in range(arguments.rounds):
        for who, target in targets.items():
            rounds[who].append(play(target, name, requests, arguments.clients))
    for who, target in targets.items():
        told = rounds[who]
        print(
            f"{label:10} {who:9} CPU {_median(r.cpu for r in told):7.1f} ms a request, "
            f"kernel {_median(r.kernel for r in told):.1f}, "
            f"{_median(r.rate for r in told):5.1f} requests/s, "
            f"median {_median(r.latency for r in told):5.0f} ms, "
            f"peak {target.peak() >> 20} MiB"
            + (f", loop late by <= {max(r.lag for r in told):.1f} ms" if target.http else "")
        )
        if told[0].stages:
            stages = {s: _median(r.stages.get(s, 0.0) for r in told) for s in told[0].stages}
            told_of = ", ".join(f"{s} {ms:.2f}" for s, ms in stages.items())
            print(f"{'':20} of it, with waiting for a thread, in ms an item: {told_of}")
    if "smg" in rounds:
        for who in ("mmrouter", "shm"):
            ratios = [a.cpu / b.cpu for a, b in zip(rounds[who], rounds["smg"], strict=True)]
            told_of = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{'':20} {who}'s CPU against the gateway's: x{_median(ratios):.2f} ({told_of})")


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gateway", default="", help="the smg command to compare with")
    parser.add_argument("--role", choices=["worker"], help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if arguments.role:
        blind_worker(rest)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
