"""`grpc.health.v1` as a real worker answers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

_NOT_SERVING = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)

Context = grpc.aio.ServicerContext[Any, Any]


class Health(HealthServicer):
    """What was `set`, and NOT_SERVING once `dead`.

    Who watches since before hears nothing of the death: a real worker asks its
    engine for each Check and once for each Watch.
    """

    def __init__(self, dead: Callable[[], bool], services: Sequence[str]) -> None:
        super().__init__()
        self._dead = dead
        self._services = services

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        if self._dead() and request.service in self._services:
            return _NOT_SERVING
        return await super().Check(request, context)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        if self._dead() and request.service in self._services:
            await context.write(_NOT_SERVING)
        else:
            await super().Watch(request, context)
