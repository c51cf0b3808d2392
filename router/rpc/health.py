"""`grpc.health.v1`: "" is the process, the engine's name whether it can route."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from router.wire import ENGINE_SERVICE

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthFace:
    """The standard health service; it asks no worker and waits for no place."""

    SERVICE = health.SERVICE_NAME

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()
        self._tasks: set[asyncio.Task[None]] = set()
        self._routable: bool | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server; the engine begins as not serving."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        self._set("", _SERVING)
        self.set_routable(False)

    def set_routable(self, routable: bool) -> None:
        """Says whether requests can be routed; watchers hear of a change."""
        if routable is not self._routable:
            self._routable = routable
            self._set(ENGINE_SERVICE, _SERVING if routable else _NOT_SERVING)

    def _set(self, service: str, status: int) -> None:
        task = asyncio.ensure_future(self._servicer.set(service, status))
        # The loop keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
