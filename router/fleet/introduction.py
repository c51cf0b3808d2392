"""Asking a worker what it is: its metadata, and its model's files where they are not known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.fleet.bundle import fetch_bundle
from router.fleet.capability import Capability
from router.fleet.identity import Identity
from router.fleet.model import Model, ModelLibrary
from router.wire import engine


@dataclass(frozen=True)
class Introduction:
    """One reading of a worker's metadata, with the answers as they came."""

    capability: Capability
    model: Model
    model_info: engine.GetModelInfoResponse
    server_info: engine.GetServerInfoResponse
    identity: Identity


class Introductions:
    """Reads metadata; `timeout` is for one call, in seconds. `clock` gives seconds."""

    def __init__(
        self, library: ModelLibrary, clock: Callable[[], float], *, timeout: float = 5.0
    ) -> None:
        self._library = library
        self._clock = clock
        self._timeout = timeout

    async def read(
        self, stub: Any, known: Introduction | None, *, reconnected: bool = False
    ) -> Introduction:
        """Asks through a `VllmEngineStub`. `known` is the last reading of the same worker.

        The model's files are fetched when another model is served than before,
        and after the connection was lost, if the worker's uptime does not tell
        whether it is still the same process. Raises `grpc.aio.AioRpcError`,
        `BundleError`, or ValueError where an answer cannot be read.
        """
        model_info = await stub.GetModelInfo(engine.GetModelInfoRequest(), timeout=self._timeout)
        server_info = await stub.GetServerInfo(engine.GetServerInfoRequest(), timeout=self._timeout)
        read_at = self._clock()
        capability = Capability.from_info(model_info, server_info)
        uptime = server_info.uptime_seconds or None

        def identity(fingerprint: str) -> Identity:
            return Identity(
                model_path=capability.model_path,
                model_type=capability.model_type,
                served_name=capability.served_name,
                kv_engine_id=capability.kv_engine_id,
                fingerprint=fingerprint,
                uptime=uptime,
                read_at=read_at,
            )

        if known is not None and not (reconnected and uptime is None):
            same = identity(known.model.fingerprint)
            if known.identity.same_files_expected == same.same_files_expected:
                return Introduction(capability, known.model, model_info, server_info, same)
        model = await self._library.model(capability, await fetch_bundle(stub))
        return Introduction(capability, model, model_info, server_info, identity(model.fingerprint))
