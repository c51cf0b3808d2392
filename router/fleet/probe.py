"""Keeps what is known of one worker true: metadata, health and load.

A worker is pending until its metadata were read and it says that it serves;
reading is tried again, with a growing pause, for as long as it takes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.fleet.bundle import BundleError, fetch_bundle
from router.fleet.capability import Capability
from router.fleet.load import ReportedLoad
from router.fleet.model import ModelLibrary
from router.fleet.worker import Worker, WorkerState
from router.observe.logging import get_logger
from router.wire import ENGINE_SERVICE, engine

_log = get_logger("fleet")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


@dataclass(frozen=True)
class ProbeSettings:
    """Intervals and `rpc_timeout` are in seconds."""

    health_interval: float = 3.0
    health_failures: int = 2
    health_successes: int = 1
    metadata_interval: float = 30.0
    load_interval: float = 1.0
    rpc_timeout: float = 5.0


class NotServing(Exception):
    """The worker answers, and says that it does not serve."""


class Probe:
    """Watches one worker until it is cancelled."""

    def __init__(
        self,
        worker: Worker,
        library: ModelLibrary,
        settings: ProbeSettings,
        clock: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._library = library
        self._settings = settings
        self._clock = clock
        self._reread = asyncio.Event()
        self._health: Any = health_pb2_grpc.HealthStub(worker.channel)
        self._failures = 0
        self._successes = 0
        self._why = ""

    def reread(self) -> None:
        """Asks for the worker's capability to be read again at once."""
        self._reread.set()

    async def run(self) -> None:
        """Reads the metadata, then follows health and load side by side."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_health())
            group.create_task(self._follow_load())

    # -- Metadata and health

    async def _follow_health(self) -> None:
        await self._introduce()
        read_at = self._clock()
        while True:
            try:
                async with asyncio.timeout(self._settings.health_interval):
                    await self._reread.wait()
            except TimeoutError:
                pass  # the usual case: nobody asked, the interval is over
            asked = self._reread.is_set()
            self._reread.clear()
            healthy = await self._check()
            due = self._clock() - read_at >= self._settings.metadata_interval
            if healthy and (asked or due or self._worker.state is WorkerState.UNHEALTHY):
                if await self._try_read():
                    read_at = self._clock()
                else:
                    healthy = False
            self._judge(healthy)

    async def _introduce(self) -> None:
        pause = _FIRST_PAUSE
        while not await self._try_read() or not await self._check():
            # Jitter, so that the workers of a restarted fleet are not asked in step.
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        if self._worker.state is WorkerState.PENDING:
            self._worker.enter(WorkerState.READY, "metadata read and serving")

    async def _try_read(self) -> bool:
        try:
            await self._read_metadata()
        except (grpc.aio.AioRpcError, BundleError, ValueError) as error:
            why = f"metadata: {_cause(error)}"
            if self._worker.state is WorkerState.PENDING:
                self._worker.enter(WorkerState.PENDING, why)
            _log.debug("metadata_failed", worker=self._worker.address, why=why)
            return False
        return True

    async def _read_metadata(self) -> None:
        stub, timeout = self._worker.stub, self._settings.rpc_timeout
        model = await stub.GetModelInfo(engine.GetModelInfoRequest(), timeout=timeout)
        server = await stub.GetServerInfo(engine.GetServerInfoRequest(), timeout=timeout)
        capability = Capability.from_info(model, server)
        if self._worker.model is None or not _same_model(self._worker.capability, capability):
            bundle = await fetch_bundle(stub)
            self._worker.model = await self._library.model(capability, bundle)
        if self._worker.capability not in (None, capability):
            _log.info("capability_changed", worker=self._worker.address)
        self._worker.capability = capability
        self._worker.model_info = model
        self._worker.server_info = server

    async def _check(self) -> bool:
        try:
            await self._ask_health()
        except (grpc.aio.AioRpcError, NotServing) as error:
            if self._worker.state is WorkerState.PENDING:
                self._worker.enter(WorkerState.PENDING, f"health: {_cause(error)}")
            self._why = _cause(error)
            return False
        return True

    async def _ask_health(self) -> None:
        timeout = self._settings.rpc_timeout
        for service in (ENGINE_SERVICE, ""):
            try:
                answer = await self._health.Check(
                    health_pb2.HealthCheckRequest(service=service), timeout=timeout
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    continue
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    break
                raise
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                raise NotServing(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
            return
        # No standard health service: the contract's own.
        own = await self._worker.stub.HealthCheck(engine.HealthCheckRequest(), timeout=timeout)
        if not own.healthy:
            raise NotServing("the engine says it is not healthy")

    def _judge(self, healthy: bool) -> None:
        self._failures = 0 if healthy else self._failures + 1
        self._successes = self._successes + 1 if healthy else 0
        state = self._worker.state
        if state is WorkerState.READY and self._failures >= self._settings.health_failures:
            self._worker.enter(WorkerState.UNHEALTHY, f"health: {self._why}")
        elif state is WorkerState.UNHEALTHY and self._successes >= self._settings.health_successes:
            self._worker.enter(WorkerState.READY, "serving again")

    # -- Load

    async def _follow_load(self) -> None:
        while True:
            if self._worker.state in (WorkerState.READY, WorkerState.DRAINING):
                await self._read_load()
            await asyncio.sleep(self._settings.load_interval)

    async def _read_load(self) -> None:
        try:
            answer = await self._worker.stub.GetLoads(
                engine.GetLoadsRequest(), timeout=self._settings.rpc_timeout
            )
        except grpc.aio.AioRpcError as error:
            # Unknown is not zero: the last report stays, and ages.
            _log.debug("load_unknown", worker=self._worker.address, why=_cause(error))
            return
        if answer.loads:
            self._worker.load.reported = _sum_of_ranks(answer, self._clock())


def _same_model(old: Capability | None, new: Capability) -> bool:
    return old is not None and (old.model_path, old.model_type, old.served_name) == (
        new.model_path,
        new.model_type,
        new.served_name,
    )


def _sum_of_ranks(answer: engine.GetLoadsResponse, at: float) -> ReportedLoad:
    loads = answer.loads
    return ReportedLoad(
        at=at,
        running=sum(x.num_running_reqs for x in loads),
        waiting=sum(x.num_waiting_reqs for x in loads),
        kv_usage=max(x.token_usage for x in loads),
        waiting_uncached_tokens=sum(x.num_waiting_uncached_tokens for x in loads),
        generation_rate=sum(x.gen_throughput for x in loads) or None,
        max_running=sum(x.max_running_requests for x in loads) or None,
    )


def _cause(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details() or ''}"[:200]
    return str(error)[:200]
