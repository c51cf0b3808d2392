"""How long `mmrouter serve` takes to serve, what it holds at rest, what a health check costs.

Kernels are compiled before; each figure is the least of `--rounds`, as other
work on the machine only adds to it.

    python scripts/bench/start.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import time

from images import SERVE, SIM
from relay import cpu_seconds, process, wait_serving

HEALTH = (sys.executable, "-m", "router", "health", "--service", "vllm.grpc.engine.VllmEngine")


def start(worker: str) -> tuple[float, float, int]:
    """Seconds until it serves, CPU seconds of them, and the bytes that it then holds."""
    began = time.monotonic()
    with process(*SERVE, "--http", "", "--worker", worker, "--log-level", "error") as (
        pid,
        address,
    ):
        asyncio.run(wait_serving(address))
        seconds, cpu = time.monotonic() - began, cpu_seconds(pid)
        return seconds, cpu, _private(pid)


def _private(pid: int) -> int:
    """Bytes of memory that a process alone holds, and its share of what others map too."""
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        (line,) = (line for line in rollup if line.startswith("Pss:"))
    return int(line.split()[1]) << 10


def probe(address: str) -> float:
    """CPU seconds of one `mmrouter health`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = (*HEALTH, "--addr", address, "--rpc-timeout", "30s")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with process(*SIM) as (_, worker):
        start(worker)
        starts = [start(worker) for _ in range(arguments.rounds)]
        probes = [probe(worker) for _ in range(arguments.rounds)]
    seconds, cpu, held = (min(column) for column in zip(*starts, strict=True))
    print(f"serving after {seconds:.2f} s ({cpu:.2f} s of CPU), load {os.getloadavg()[0]:.0f}")
    print(f"at rest: {held / 2**20:.0f} MiB")
    print(f"mmrouter health: {min(probes):.3f} s of CPU")


if __name__ == "__main__":
    main()
