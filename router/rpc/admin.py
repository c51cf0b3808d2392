"""`mmrouter.v1.RouterAdmin`: the fleet for operators."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from router.config import worker_address
from router.faults import Fault
from router.fleet.fleet import Fleet
from router.fleet.role import effective_role
from router.fleet.worker import Role, Worker
from router.observe.logging import get_logger, level, set_level
from router.request.explain import Explainer
from router.request.show import show_load
from router.rpc.errors import internal, wire_error
from router.wire import admin, router_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

_log = get_logger("admin")

ROLES = {
    admin.WORKER_ROLE_UNSPECIFIED: Role.BOTH,
    admin.BOTH: Role.BOTH,
    admin.PREFILL: Role.PREFILL,
    admin.DECODE: Role.DECODE,
    admin.ENCODE: Role.ENCODE,
}


def _told(
    serve: Callable[[AdminService, Any, Context], Awaitable[T]],
) -> Callable[[AdminService, Any, Context], Awaitable[T]]:
    """An RPC whose own faults are told as the table has them, and none in Python's words."""

    @functools.wraps(serve)
    async def rpc(service: AdminService, request: Any, context: Context) -> T:
        try:
            return await serve(service, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            fault = error if isinstance(error, Fault) else internal(_log, error)
            failed = wire_error(fault)
            await context.abort(failed.code, failed.message, failed.trailers)

    return rpc


class AdminService(router_pb2_grpc.RouterAdminServicer):
    """Lists and changes workers, and explains requests."""

    def __init__(self, fleet: Fleet, explainer: Explainer, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._explainer = explainer
        self._clock = clock

    @_told
    async def ListWorkers(
        self, request: admin.ListWorkersRequest, context: Context
    ) -> admin.ListWorkersResponse:
        """Every registered worker, in order of registration."""
        return admin.ListWorkersResponse(workers=[self._shown(w) for w in self._fleet.registry])

    @_told
    async def AddWorker(
        self, request: admin.AddWorkerRequest, context: Context
    ) -> admin.AddWorkerResponse:
        """Registers a worker, pending."""
        try:
            address = worker_address(request.address)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        role = ROLES.get(request.role)
        if role is None:
            why = f"role is {int(request.role)}, which is no WorkerRole"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        try:
            worker = self._fleet.add(address, role=role, labels=dict(request.labels))
        except ValueError as error:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, str(error))
        return admin.AddWorkerResponse(worker=self._shown(worker))

    @_told
    async def DrainWorker(
        self, request: admin.DrainWorkerRequest, context: Context
    ) -> admin.DrainWorkerResponse:
        """Stops new requests for a worker; it goes when it is idle."""
        worker = await self._worker(request.address, context)
        self._fleet.drain(worker)
        return admin.DrainWorkerResponse(worker=self._shown(worker))

    @_told
    async def RemoveWorker(
        self, request: admin.RemoveWorkerRequest, context: Context
    ) -> admin.RemoveWorkerResponse:
        """Takes a worker out at once."""
        worker = await self._worker(request.address, context)
        await self._fleet.remove(worker)
        return admin.RemoveWorkerResponse(worker=self._shown(worker))

    @_told
    async def Explain(
        self, request: admin.ExplainRequest, context: Context
    ) -> admin.ExplainResponse:
        """What would happen to a Generate."""
        return await self._explainer.explain(request.request)

    @_told
    async def SetLogLevel(
        self, request: admin.SetLogLevelRequest, context: Context
    ) -> admin.SetLogLevelResponse:
        """Changes what is logged, or only tells it."""
        before = level()
        if request.level not in admin.LogLevel.values():
            why = f"level is {int(request.level)}, which is no LogLevel"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        if request.level != admin.LOG_LEVEL_UNSPECIFIED:
            set_level(admin.LogLevel.Name(request.level))
        after = level()
        if after != before:
            _log.warning("log_level", before=before, after=after)
        return admin.SetLogLevelResponse(level=after.upper(), before=before.upper())

    async def _worker(self, address: str, context: Context) -> Worker:
        try:
            found = self._fleet.registry.get(worker_address(address))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if found is None:
            await _not_found(context, address)
        return found

    def _shown(self, worker: Worker) -> admin.Worker:
        return show_worker(worker, self._clock())


async def _not_found(context: Context, address: str) -> NoReturn:
    await context.abort(grpc.StatusCode.NOT_FOUND, "no worker is registered at that address")


def show_worker(worker: Worker, now: float) -> admin.Worker:
    """A worker as RouterAdmin shows it."""
    shown = admin.Worker(
        address=worker.address,
        generation=worker.generation,
        state=worker.state.name,
        reason=worker.state_reason,
        seconds_in_state=worker.seconds_in_state,
        role=effective_role(worker).name,
        model=worker.model_name or "",
        load=show_load(worker, now),
        labels=dict(worker.labels),
    )
    capability = worker.capability
    if capability is not None:
        shown.capability.CopyFrom(
            admin.Capability(
                mm_processor=capability.mm_processor,
                media_ref_schemes=sorted(capability.schemes),
                device_normalize=capability.device_normalize,
                encoder_dtype=capability.encoder_dtype,
                item_limits=dict(capability.item_limits),
                encoder_budget=capability.encoder_budget or 0,
                max_context_length=capability.context_length or 0,
                block_size=capability.block_size or 0,
                max_num_seqs=capability.max_num_seqs or 0,
            )
        )
    return shown
