"""What a second router process brings: requests a second of one process against several.

The worker and the streams are those of `relay.py`. Clients are processes too,
with several connections each, as the kernel spreads connections and not
requests. On a machine with few cores they and the worker take theirs from the
router, so look at the CPU time a request as well: it is what each process adds.

    python scripts/bench/processes.py [--processes 2] [--rounds 3] [--seconds 4]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path

import grpc
from relay import cpu_seconds, process, wait_serving

from router.wire import ENGINE_SERVICE, engine

_METHOD = f"/{ENGINE_SERVICE}/Generate"
_OWN = [("grpc.use_local_subchannel_pool", 1)]


async def load(address: str, seconds: float, connections: int, streams: int, length: int) -> int:
    """Streams of `length` messages for so long, `streams` at once on each connection."""
    request = engine.GenerateRequest(
        request_id="bench",
        tokenized=engine.TokenizedInput(input_ids=range(64)),
        sampling_params=engine.SamplingParams(max_tokens=length),
        stream=True,
    ).SerializeToString()
    end, done = time.monotonic() + seconds, 0

    async def client(channel: grpc.aio.Channel) -> None:
        nonlocal done
        call = channel.unary_stream(_METHOD)
        while time.monotonic() < end:
            async for _ in call(request):
                pass
            done += 1

    channels = [grpc.aio.insecure_channel(address, _OWN) for _ in range(connections)]
    await asyncio.gather(*(client(channel) for channel in channels for _ in range(streams)))
    for channel in channels:
        await channel.close()
    return done


def family(pid: int) -> list[int]:
    """The router processes that a router consists of, its supervisor left out."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    routers = [int(c) for c in children if "router.cli.child" in _command(c)]
    return routers or [pid]


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def measure(address: str, pid: int, arguments: argparse.Namespace) -> tuple[float, list[float]]:
    """Requests a second, and how busy each router process was."""
    pids = family(pid)
    before, began = [cpu_seconds(p) for p in pids], time.monotonic()
    given = (address, arguments.seconds, arguments.connections, arguments.streams, arguments.length)
    clients = [
        subprocess.Popen(
            [sys.executable, __file__, "--client", *map(str, given)], stdout=subprocess.PIPE
        )
        for _ in range(arguments.clients)
    ]
    done = sum(int(client.communicate()[0]) for client in clients)
    took = time.monotonic() - began
    busy = [(cpu_seconds(p) - b) / took for p, b in zip(pids, before, strict=True)]
    return done / took, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--connections", type=int, default=16, help="of each client")
    parser.add_argument("--streams", type=int, default=2, help="at once on each connection")
    parser.add_argument("--length", type=int, default=16, help="messages of a stream")
    parser.add_argument("--client", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        address, seconds, *numbers = arguments.client
        print(asyncio.run(load(address, float(seconds), *map(int, numbers))))
        return
    relay = str(Path(__file__).with_name("relay.py"))
    serve = (sys.executable, "-m", "router", "serve", "--listen", "127.0.0.1:0", "--http", "")
    common = ("--log-level", "warning", "--overload-waiting", "100000")
    several = ("--processes", str(arguments.processes))
    with ExitStack() as stack:

        def start(*command: str) -> tuple[int, str]:
            return stack.enter_context(process(*command))

        workers = [
            start(sys.executable, relay, "--role", "worker")[1] for _ in range(arguments.workers)
        ]
        fleet = (*common, "--worker", ",".join(workers))
        one, many = start(*serve, *fleet), start(*serve, *fleet, *several)
        rates: dict[str, list[float]] = {}
        costs: dict[str, list[float]] = {}
        shares: dict[str, list[float]] = {}
        routers = {"1 process": one, f"{arguments.processes} processes": many}
        for _, address in routers.values():
            asyncio.run(wait_serving(address))
            asyncio.run(load(address, 1.0, 8, 2, 16))
        for _ in range(arguments.rounds):
            for name, (pid, address) in routers.items():
                rate, busy = measure(address, pid, arguments)
                rates.setdefault(name, []).append(rate)
                costs.setdefault(name, []).append(sum(busy) / rate * 1e6)
                shares[name] = busy
    print(
        f"{date.today()}, {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}; {arguments.clients} clients of {arguments.connections} "
        f"connections, streams of {arguments.length} messages, {arguments.rounds} rounds"
    )
    base = statistics.median(rates["1 process"])
    for name, rate in rates.items():
        median = statistics.median(rate)
        print(
            f"{name:12} {median:6.0f} requests/s x{median / base:.2f} | "
            f"{statistics.median(costs[name]):5.0f} us CPU a request | "
            f"each busy {', '.join(f'{share:.0%}' for share in shares[name])}"
        )


if __name__ == "__main__":
    main()
