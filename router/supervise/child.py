"""One router process, as its supervisor sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import aiohttp

from router.config import Settings
from router.supervise.place import Place, told

MODULE = "router.cli.child"

_ANNOUNCEMENT = b"listening on "


class Child:
    """A process from its start to its end.

    It gets its settings by a pipe that stays open: when that ends, the process
    knows that its supervisor has died, and ends too.
    """

    def __init__(self, place: Place, process: asyncio.subprocess.Process) -> None:
        self.number = place.number
        self.pid = process.pid
        self.began = time.monotonic()
        # Whether it takes connections.
        self.listens = False
        # Its metrics as they were last read.
        self.metrics = ""
        self._process = process
        self._http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(place.http.removeprefix("unix:"), force_close=True)
        )

    @classmethod
    async def start(cls, place: Place, settings: Settings) -> Child:
        """A fresh interpreter: nothing of gRPC survives a fork."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            # The working directory is searched for modules only if it is here.
            *(() if os.getcwd() in sys.path else ("-P",)),
            *("-m", MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A terminal's Ctrl-C is for the supervisor, which passes it on once.
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(told(place, settings))
        return cls(place, process)

    async def up(self) -> bool:
        """Waits until it takes connections; False when it has ended instead."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        self.listens = line.startswith(_ANNOUNCEMENT) and self._process.returncode is None
        return self.listens

    async def ended(self) -> int:
        """Waits for its end; the exit code, or minus the number of a signal."""
        code = await self._process.wait()
        self.listens = False
        await self._http.close()
        return code

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if it still runs."""
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def ask(self, path: str, timeout: float) -> tuple[int, str] | None:
        """Status and text of its answer over HTTP, or None when there is none in time."""
        if self._http.closed:
            return None
        try:
            limit = aiohttp.ClientTimeout(total=timeout)
            async with self._http.get(f"http://process{path}", timeout=limit) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def read_metrics(self, timeout: float) -> bool:
        """Reads its metrics; whether it gave them in time."""
        answer = await self.ask("/metrics", timeout)
        if answer is None or answer[0] != 200:
            return False
        self.metrics = answer[1]
        return True
