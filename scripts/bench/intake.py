"""What taking in pictures costs the event loop, and what it costs in memory.

Run: python scripts/bench/intake.py [--images 32] [--flood 200]

Three loads, each beside a loop that ticks every millisecond as a token stream
would: nothing; `--images` photographs of 12 megapixels, as data: URLs, all at
once; and `--flood` requests of 28 one-megapixel pictures against a budget of
512 MiB, most of which must be turned away. The table gives the longest gap
between two ticks, which is the longest pause any stream would have seen.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import io
import os
import platform
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version

import numpy as np
from PIL import Image

from router.faults import Fault
from router.media.intake import MediaIntake, MediaSource
from router.media.limits import MIB, MediaLimits
from router.media.pool import cores

TICK = 0.001


@dataclass
class Ticker:
    """A task that wants to run every millisecond, and notes when it could not."""

    gaps: list[float] = field(default_factory=list)

    async def run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            self.gaps.append(now - last)
            last = now


def photograph(width: int, height: int, *, seed: int = 1) -> bytes:
    """A JPEG with the detail of a photograph: noise at several scales."""
    rng = np.random.default_rng(seed)
    picture = np.zeros((height, width, 3), np.float32)
    for scale in (256, 64, 16, 4):
        small = rng.integers(0, 256, (height // scale + 2, width // scale + 2, 3), dtype=np.uint8)
        large = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        picture += np.asarray(large, np.float32) / 4
    file = io.BytesIO()
    Image.fromarray(picture.astype(np.uint8)).save(file, "JPEG", quality=84)
    return file.getvalue()


async def nothing() -> str:
    """The loop's own unrest on this machine."""
    await asyncio.sleep(2.0)
    return ""


async def large_pictures(url: str, count: int) -> str:
    """`count` pictures at once, decoded, from data: URLs."""
    intake = MediaIntake(MediaLimits(budget_wait=600.0))

    async def one() -> None:
        with intake.ticket() as ticket:
            await ticket.decode(await ticket.load(MediaSource("image", url=url), 0))

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    spent = time.perf_counter() - started
    await intake.close()
    return f"{count / spent:.1f} pictures/s"


async def flood(data: bytes, requests: int) -> str:
    """`requests` x 28 pictures of 1 MP against 512 MiB: admitted or turned away at once."""
    limits = MediaLimits(
        budget_bytes=128 * MIB, budget_pixels=384 * MIB // 3, request_pixels=384 * MIB // 3
    )
    intake = MediaIntake(limits)
    outcomes: Counter[str] = Counter()
    slowest = 0.0

    async def one() -> None:
        nonlocal slowest
        started = time.perf_counter()
        try:
            with intake.ticket() as ticket:
                source = MediaSource("image", data=data)
                blobs = [await ticket.load(source, index) for index in range(28)]
                kept = [await ticket.decode(blob) for blob in blobs]
                assert len(kept) == 28
                outcomes["ok"] += 1
        except Fault as fault:
            outcomes[fault.reason.value] += 1
            slowest = max(slowest, time.perf_counter() - started)

    gc.collect()
    before = resident()
    watch = Watch()
    watching = asyncio.create_task(watch.run())
    await asyncio.gather(*(one() for _ in range(requests)))
    watching.cancel()
    await intake.close()
    told = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    grown = (watch.peak - before) / MIB
    return f"+{grown:.0f} MiB at most; {told}; the last told after {slowest * 1000:.0f} ms"


@dataclass
class Watch:
    """A task that keeps the largest resident size it has seen."""

    peak: int = 0

    async def run(self) -> None:
        while True:
            self.peak = max(self.peak, resident())
            await asyncio.sleep(0.005)


def resident() -> int:
    """Bytes of memory this process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def measured(load: Callable[[], Awaitable[str]]) -> tuple[list[float], str]:
    """The gaps of a ticking task while `load` runs, in ms and sorted, and the load's own words."""
    ticker = Ticker()
    task = asyncio.create_task(ticker.run())
    words = await load()
    task.cancel()
    return sorted((gap - TICK) * 1000 for gap in ticker.gaps), words


async def main() -> None:
    """Runs the loads and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--flood", type=int, default=200)
    options = parser.parse_args()
    large = "data:image/jpeg;base64," + base64.b64encode(photograph(4032, 3024)).decode()
    small = photograph(1152, 864)
    loads: list[tuple[str, Callable[[], Awaitable[str]]]] = [
        ("nothing", nothing),
        (f"{options.images} x 12 MP at once", lambda: large_pictures(large, options.images)),
        (f"{options.flood} x 28 x 1 MP, 512 MiB", lambda: flood(small, options.flood)),
    ]
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("opencv-python-headless", "pillow", "numpy")
    )
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {cores()} cores,"
        f" load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, {versions}"
    )
    print(f"{'load':28} {'ticks':>6} {'p50 ms':>7} {'p99 ms':>7} {'worst ms':>8}  remarks")
    for name, load in loads:
        gaps, words = await measured(load)
        p50, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
        print(f"{name:28} {len(gaps):6} {p50:7.2f} {p99:7.2f} {gaps[-1]:8.2f}  {words}")


if __name__ == "__main__":
    asyncio.run(main())
