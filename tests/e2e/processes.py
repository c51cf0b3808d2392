"""Commands as processes of their own that go on running."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.serving import eventually

START = 120.0


@dataclass
class Running:
    """One process; `address` is where it listens, `lines` its log so far."""

    process: asyncio.subprocess.Process
    address: str = ""
    lines: list[dict[str, Any]] = field(default_factory=list)
    reading: asyncio.Task[None] | None = None

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == name]

    @property
    def http(self) -> str:
        return f"http://{self.events('listening')[0]['http']}"

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self, timeout: float = 60.0) -> int:
        """Waits for its end, and for all that it has logged; the exit code."""
        async with asyncio.timeout(timeout):
            code = await self.process.wait()
            if self.reading is not None:
                await asyncio.wait([self.reading])
            return code


@asynccontextmanager
async def mmrouter(*args: str, start: float = START) -> AsyncIterator[Running]:
    """`mmrouter …`, from when it listens; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "router", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    running = Running(process)
    running.reading = asyncio.create_task(_read_log(running))
    try:
        assert process.stdout is not None
        async with asyncio.timeout(start):
            line = (await process.stdout.readline()).decode()
        told = re.fullmatch(r"listening on (\S+)\n", line)
        assert told, f"{line!r} {running.lines}"
        running.address = told[1]
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await running.reading


async def _read_log(running: Running) -> None:
    assert running.process.stderr is not None
    async for line in running.process.stderr:
        try:
            running.lines.append(json.loads(line))
        except ValueError:
            running.lines.append({"event": "text", "text": line.decode(errors="replace")})


@asynccontextmanager
async def router(*args: str) -> AsyncIterator[Running]:
    """`mmrouter serve` on free ports, with brisk probes."""
    given = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--health-interval", "100ms")
    async with mmrouter("serve", *given, *args) as running:
        # What it has logged before comes by another pipe, which may be read later.
        await eventually(lambda: running.events("listening"), "logged")
        yield running
