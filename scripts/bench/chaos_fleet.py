"""The processes of the chaos run: simulated workers that die, freeze and change, and one router."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What a worker may come back as, over what it was.
KINDS: tuple[tuple[str, ...], ...] = (
    (),
    ("--mm-processor", "off"),
    ("--mm-processor", "off", "--no-device-normalize"),
    ("--style", "rust"),
    ("--max-num-seqs", "8"),
)
_START = 90.0


class Child:
    """A process of ours, with its standard output read line by line."""

    def __init__(self, *argv: str, log: Path) -> None:
        self._argv = argv
        self._log = log
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, first: str) -> str:
        """Starts it; returns its first line, which begins with `first`."""
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, *self._argv, stdout=asyncio.subprocess.PIPE, stderr=log
            )
        return await self.line(first)

    async def line(self, first: str) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        async with asyncio.timeout(_START):
            line = (await self.process.stdout.readline()).decode().strip()
        if not line.startswith(first):
            raise RuntimeError(f"{self._argv}: {line!r}; see {self._log}")
        return line

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it, frozen or not; returns the exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
            self.process.send_signal(signal.SIGCONT)
        try:
            return await asyncio.wait_for(self.process.wait(), 60)
        except TimeoutError:
            self.process.kill()
            return await self.process.wait()


@dataclass
class Kill:
    """A worker that was killed, and when (monotonic seconds)."""

    address: str
    at: float


@dataclass
class Fleet:
    """Simulated workers, a process each, and the file that lists them."""

    size: int
    folder: Path
    rng: random.Random
    kills: list[Kill] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.file = self.folder / "workers.toml"
        self._addresses = [f"127.0.0.1:{port}" for port in free_ports(self.size)]
        self._workers: dict[str, Child] = {}
        self._disturbed: set[str] = set()
        self._hidden: set[str] = set()

    async def start(self) -> None:
        await asyncio.gather(*(self._launch(address, ()) for address in self._addresses))
        self._list()

    async def stop(self) -> None:
        await asyncio.gather(*(w.end(signal.SIGKILL) for w in self._workers.values()))

    async def _launch(self, address: str, kind: tuple[str, ...]) -> None:
        child = Child(
            *("-m", "router", "sim", "--listen", address, "--time-per-output-token", "8ms", *kind),
            log=self.folder / "workers.log",
        )
        self._workers[address] = child
        await child.start("listening on")

    def _list(self) -> None:
        entries = [
            f'[[workers]]\naddress = "{address}"\n'
            for address in self._addresses
            if address not in self._hidden
        ]
        fresh = self.file.with_suffix(".new")
        fresh.write_text("".join(entries))
        fresh.replace(self.file)

    # -- Trouble

    async def trouble(self, seconds: float, pause: float) -> None:
        """Makes trouble until time is over, then waits until all of it is mended."""
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < until:
                calm = [a for a in self._addresses if a not in self._disturbed]
                # Half of the fleet stays up, so that every request has somewhere to go.
                if len(calm) > self.size // 2:
                    address = self.rng.choice(calm)
                    self._disturbed.add(address)
                    group.create_task(self._disturb(address))
                await asyncio.sleep(pause * self.rng.uniform(0.5, 1.5))
        self._list()

    async def _disturb(self, address: str) -> None:
        name, act = self.rng.choice(
            [
                ("killed", self._kill),
                ("frozen", self._freeze),
                ("changed", self._change),
                ("hidden", self._hide),
                ("garbled", self._garble),
            ]
        )
        self.counts[name] = self.counts.get(name, 0) + 1
        try:
            await act(address)
        finally:
            self._disturbed.discard(address)

    async def _kill(self, address: str, kind: tuple[str, ...] = ()) -> None:
        self.kills.append(Kill(address, time.monotonic()))
        await self._workers[address].end(signal.SIGKILL)
        await asyncio.sleep(self.rng.uniform(0, 1))
        await self._launch(address, kind)

    async def _change(self, address: str) -> None:
        await self._kill(address, self.rng.choice(KINDS))

    async def _freeze(self, address: str) -> None:
        self._workers[address].send(signal.SIGSTOP)
        try:
            await asyncio.sleep(self.rng.uniform(1, 5))
        finally:
            self._workers[address].send(signal.SIGCONT)

    async def _hide(self, address: str) -> None:
        for _ in range(self.rng.randint(1, 3)):
            self._hidden.add(address)
            self._list()
            await asyncio.sleep(self.rng.uniform(0.05, 1.5))
            self._hidden.discard(address)
            self._list()
            await asyncio.sleep(self.rng.uniform(0.05, 0.5))

    async def _garble(self, address: str) -> None:
        self.file.write_text('[[workers]]\naddress = "')
        await asyncio.sleep(self.rng.uniform(0.05, 1))
        self._list()


class Router(Child):
    """`chaos.py --as-router`: the router's own app, which tells on SIGUSR1 what it holds."""

    async def launch(self) -> str:
        """Its gRPC address."""
        return (await self.start("listening on")).removeprefix("listening on ")

    async def held(self) -> dict[str, Any]:
        """See `holdings`."""
        self.send(signal.SIGUSR1)
        holdings: dict[str, Any] = json.loads(await self.line("{"))
        return holdings


async def serve(settings: list[str]) -> None:
    """Runs a router in this process, with `settings` as NAME=VALUE."""
    from router import config
    from router.app import App
    from router.observe import logging

    logging.configure("json", "info")
    app = App(config.load(dict(setting.split("=", 1) for setting in settings)))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, app.stop)
    loop.add_signal_handler(signal.SIGUSR1, lambda: print(json.dumps(holdings(app)), flush=True))
    await app.run()


def holdings(app: Any) -> dict[str, Any]:
    """What the router holds now: leases, requests, workers, tasks, descriptors, memory."""
    registry = app.registry
    requests = app.metrics.registry.get_sample_value("router_requests_in_flight")
    samples = (s for m in app.metrics.registry.collect() for s in m.samples)
    outcomes = {
        f"{s.labels['outcome']}/{s.labels['reason']}": s.value
        for s in samples
        if s.name == "router_requests_total"
    }
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "leases": sum(w.load.in_flight for w in registry),
        "reserved": sum(w.load.reserved_tokens for w in registry),
        "requests": requests,
        "attempts": len(app.dispatcher.running.all()),
        "places": app.admission.active + app.admission.waiting,
        "workers": len(registry),
        "ready": sum(w.state.value == "ready" for w in registry),
        "tasks": len(asyncio.all_tasks()),
        "descriptors": _descriptors(),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "outcomes": outcomes,
    }


def _descriptors() -> list[str]:
    """What each descriptor is; sockets with the states that the system has them in."""
    states = {
        row.split()[9]: f"tcp {row.split()[2]} {row.split()[3]}"
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for row in Path(table).read_text().splitlines()[1:]
    }
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # that of the listing itself
            continue
        inode = target.partition("socket:[")[2].rstrip("]")
        found.append(states.get(inode, target.partition(":[")[0]))
    return sorted(found)


def free_ports(count: int) -> list[int]:
    """Ports below the range from which systems take clients' ports, so that they stay free."""
    found: list[int] = []
    for port in range(21_000 + os.getpid() % 5_000, 32_000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")
