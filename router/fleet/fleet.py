"""The fleet at work: registry, probes, and workers coming and going."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import grpc

from router.fleet.endpoint import Endpoint, Role
from router.fleet.model import ModelLibrary
from router.fleet.probe import Probe, ProbeSettings
from router.fleet.registry import Registry
from router.fleet.worker import Worker, WorkerState
from router.observe.logging import get_logger

_log = get_logger("fleet")


class Fleet:
    """Owns the registry's workers: one supervised probe and one channel each.

    `drain_timeout` and `longest_call` are in seconds; no call to a worker
    outlives `longest_call`.
    """

    def __init__(
        self,
        registry: Registry,
        settings: ProbeSettings,
        *,
        drain_timeout: float = 30.0,
        longest_call: float = 600.0,
    ) -> None:
        self.registry = registry
        self._settings = settings
        self._drain_timeout = drain_timeout
        self._longest_call = longest_call
        self._library = ModelLibrary()
        self._probes: dict[Worker, tuple[Probe, asyncio.Task[None]]] = {}
        self._drains: dict[Worker, asyncio.Task[None]] = {}
        # Connections that were renewed, until the last call on them must have ended.
        self._former: dict[Worker, list[grpc.aio.Channel]] = {}
        self._chores: set[asyncio.Task[None]] = set()

    def add(
        self,
        address: str,
        *,
        role: Role = Role.BOTH,
        model: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> Worker:
        """Registers a worker and starts to watch it. Raises ValueError when it is there."""
        return self.admit(Endpoint(address, role, model, dict(labels or {})))

    def admit(self, endpoint: Endpoint) -> Worker:
        """As `add`, for a worker as a source of workers describes it."""
        worker = self.registry.add(endpoint)
        probe = Probe(
            worker,
            self._library,
            self._settings,
            self.registry.clock,
            lambda why: self.replace(worker, why),
        )
        self._probes[worker] = probe, self._start_probe(worker, probe)
        return worker

    def reread(self, worker: Worker) -> None:
        """Has a worker's capability read again at once."""
        if worker in self._probes:
            self._probes[worker][0].reread()

    def suspect(self, worker: Worker) -> None:
        """Has a worker's health checked at once, as a call of it has failed."""
        if worker in self._probes:
            self._probes[worker][0].suspect()

    def replace(self, worker: Worker, why: str, endpoint: Endpoint | None = None) -> None:
        """Another engine is at a worker's address: a new generation, known for nothing yet.

        The old one finishes what it has. `endpoint` is what the new one is
        meant for, where that has changed.
        """
        self.drain(worker, f"replaced: {why}")
        if self.registry.get(worker.address) is worker:
            self.admit(endpoint or worker.endpoint)

    def drain(self, worker: Worker, reason: str = "drained by command") -> None:
        """No new requests; when the running ones are done, or time is over, it goes."""
        if worker.state in (WorkerState.DRAINING, WorkerState.GONE):
            return
        worker.enter(WorkerState.DRAINING, reason)
        self._drains[worker] = asyncio.create_task(
            self._drained(worker, reason), name=f"drain {worker.address}"
        )

    async def remove(self, worker: Worker, reason: str = "removed by command") -> None:
        """Takes a worker out at once; its running calls end with its channel."""
        drain = self._drains.pop(worker, None)
        if drain is not None and drain is not asyncio.current_task():
            drain.cancel()
        self.registry.remove(worker, reason)
        # Whoever asked may lose patience; the channel is closed all the same.
        await asyncio.shield(self._own(self._disconnect(worker), f"close {worker.address}"))

    async def renew_channels(self) -> None:
        """Connects to every worker anew, as its credentials have changed.

        Calls that run end on the connections that they were made on.
        """
        for worker, (probe, _) in list(self._probes.items()):
            await self._stop_probe(worker)
            # It may have gone since, while the probes before its own were stopped.
            if worker.state in (WorkerState.DRAINING, WorkerState.GONE):
                continue
            before = worker.channel
            worker.connect(self.registry.open_channel(worker.address))
            self._probes[worker] = probe, self._start_probe(worker, probe)
            self._former.setdefault(worker, []).append(before)
            self._own(self._close_later(worker, before), f"former channel {worker.address}")

    async def close(self) -> None:
        """Stops every probe and closes every channel."""
        for worker in list(self.registry):
            await self.remove(worker, "the router stops")
        for chore in list(self._chores):
            chore.cancel()
        if self._chores:
            await asyncio.wait(self._chores)

    # -- Tasks

    def _start_probe(self, worker: Worker, probe: Probe) -> asyncio.Task[None]:
        return asyncio.create_task(self._watch(worker, probe), name=f"probe {worker.address}")

    async def _stop_probe(self, worker: Worker) -> None:
        if worker in self._probes:
            _, task = self._probes.pop(worker)
            task.cancel()
            await asyncio.wait([task])

    async def _watch(self, worker: Worker, probe: Probe) -> None:
        while True:
            try:
                await probe.run()
            except* Exception as group:
                # A probe that fails for a reason of ours must not leave its worker unwatched.
                _log.error("probe_failed", worker=worker.address, exc_info=group)
            await asyncio.sleep(self._settings.health_interval)

    async def _drained(self, worker: Worker, reason: str) -> None:
        await self._stop_probe(worker)
        try:
            async with asyncio.timeout(self._drain_timeout):
                await worker.load.idle.wait()
        except TimeoutError:
            _log.warning("drain_timeout", worker=worker.address, running=worker.load.in_flight)
        await self.remove(worker, reason)

    async def _disconnect(self, worker: Worker) -> None:
        await self._stop_probe(worker)
        for channel in (*self._former.pop(worker, ()), worker.channel):
            await channel.close()

    def _own(self, chore: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(chore, name=name)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        return task

    async def _close_later(self, worker: Worker, channel: grpc.aio.Channel) -> None:
        await asyncio.sleep(self._longest_call)
        former = self._former.get(worker, [])
        if channel in former:
            former.remove(channel)
            await channel.close()
