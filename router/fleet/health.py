"""Asking a worker whether it serves, and judging by what it answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.fleet.checked import CheckedChannel
from router.wire import ENGINE_SERVICE, engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub

_Status = health_pb2.HealthCheckResponse


class NotServing(Exception):
    """The worker answers, and says that it does not serve."""


class WatchUnsupported(Exception):
    """The worker has no `grpc.health.v1` Watch, or none for a service of ours."""


class HealthQuestions:
    """The health RPCs of one worker: `grpc.health.v1`, or else the engine's own."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        checked: Any = CheckedChannel(channel)
        self._health: Any = health_pb2_grpc.HealthStub(checked)
        self._engine: Any = VllmEngineStub(checked)

    async def check(self, timeout: float) -> None:
        """Asks once. Raises `NotServing` or `grpc.aio.AioRpcError`; `timeout` in seconds."""
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
            if answer.status != _Status.SERVING:
                raise NotServing(_named(answer.status))
            return
        # No standard health service: the contract's own.
        own = await self._engine.HealthCheck(engine.HealthCheckRequest(), timeout=timeout)
        if not own.healthy:
            raise NotServing("the engine says it is not healthy")

    async def watch(self) -> AsyncGenerator[str, None]:
        """The worker's status by name, now and at each change, until the connection ends.

        Raises `WatchUnsupported` or `grpc.aio.AioRpcError`.
        """
        for service in (ENGINE_SERVICE, ""):
            call = self._health.Watch(health_pb2.HealthCheckRequest(service=service))
            try:
                async for answer in call:
                    if answer.status == _Status.SERVICE_UNKNOWN:
                        break
                    yield _named(answer.status)
                else:
                    return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (
                    grpc.StatusCode.UNIMPLEMENTED,
                    grpc.StatusCode.NOT_FOUND,
                ):
                    raise
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    break
            finally:
                call.cancel()
        raise WatchUnsupported


class Streaks:
    """Counts good and bad checks in a row. Pure."""

    def __init__(self, failures: int, successes: int) -> None:
        self._failures = failures
        self._successes = successes
        self._bad = 0
        self._good = 0

    def good(self) -> bool:
        """Notes a good check; whether there were enough of them for a recovery."""
        self._bad = 0
        self._good += 1
        return self._good >= self._successes

    def bad(self) -> bool:
        """Notes a bad check; whether there were enough of them for ill health."""
        self._good = 0
        self._bad += 1
        return self._bad >= self._failures


def _named(status: int) -> str:
    # A number that the contract does not have is as good as not serving.
    known = status in _Status.ServingStatus.values()
    return str(_Status.ServingStatus.Name(status)) if known else f"status {status}"
