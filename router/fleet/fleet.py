"""The fleet at work: registry, probes, and workers coming and going."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from router.fleet.model import ModelLibrary
from router.fleet.probe import Probe, ProbeSettings
from router.fleet.registry import Registry
from router.fleet.worker import Role, Worker, WorkerState
from router.observe.logging import get_logger

_log = get_logger("fleet")


class Fleet:
    """Owns the registry's workers: one supervised probe and one channel each."""

    def __init__(
        self, registry: Registry, settings: ProbeSettings, *, drain_timeout: float = 30.0
    ) -> None:
        self.registry = registry
        self._settings = settings
        self._drain_timeout = drain_timeout
        self._library = ModelLibrary()
        self._probes: dict[Worker, tuple[Probe, asyncio.Task[None]]] = {}
        self._drains: dict[Worker, asyncio.Task[None]] = {}

    def add(
        self, address: str, *, role: Role = Role.BOTH, labels: Mapping[str, str] | None = None
    ) -> Worker:
        """Registers a worker and starts to watch it. Raises ValueError when it is there."""
        worker = self.registry.add(address, role=role, labels=labels)
        probe = Probe(worker, self._library, self._settings, self.registry.clock)
        task = asyncio.create_task(self._watch(worker, probe), name=f"probe {address}")
        self._probes[worker] = (probe, task)
        return worker

    def reread(self, worker: Worker) -> None:
        """Has a worker's capability read again at once."""
        if worker in self._probes:
            self._probes[worker][0].reread()

    def drain(self, worker: Worker) -> None:
        """No new requests; when the running ones are done, or time is over, it goes."""
        if worker.state in (WorkerState.DRAINING, WorkerState.GONE):
            return
        worker.enter(WorkerState.DRAINING, "drained by command")
        self._drains[worker] = asyncio.create_task(
            self._drained(worker), name=f"drain {worker.address}"
        )

    async def remove(self, worker: Worker, reason: str = "removed by command") -> None:
        """Takes a worker out at once; its running calls end with its channel."""
        drain = self._drains.pop(worker, None)
        if drain is not None and drain is not asyncio.current_task():
            drain.cancel()
        self.registry.remove(worker, reason)
        if worker in self._probes:
            _, task = self._probes.pop(worker)
            task.cancel()
            await asyncio.wait([task])
        await worker.channel.close()

    async def close(self) -> None:
        """Stops every probe and closes every channel."""
        for worker in list(self._probes):
            await self.remove(worker, "the router stops")

    async def _watch(self, worker: Worker, probe: Probe) -> None:
        while True:
            try:
                await probe.run()
            except* Exception as group:
                # A probe that fails for a reason of ours must not leave its worker unwatched.
                _log.error("probe_failed", worker=worker.address, exc_info=group)
            await asyncio.sleep(self._settings.health_interval)

    async def _drained(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._drain_timeout):
                await worker.load.idle.wait()
        except TimeoutError:
            _log.warning("drain_timeout", worker=worker.address, running=worker.load.in_flight)
        await self.remove(worker, "drained")
