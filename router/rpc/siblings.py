"""Router processes that share a port: what operators and Abort say to one holds for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import grpc

from router.observe.logging import get_logger
from router.rpc.admin import AdminService, Context
from router.rpc.errors import STATUS_DETAILS
from router.rpc.orders import ORDERS_METHOD, ORDERS_SERVICE, Orders
from router.supervise.place import Place
from router.wire import ENGINE_SERVICE, admin, engine, router_pb2_grpc
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub

T = TypeVar("T")
_Error = grpc.aio.AioRpcError

_log = get_logger("admin")

_TIMEOUT = 5.0
# Breakers, from the best to the worst.
_BREAKERS = ("closed", "half_open", "open")
# What a process may answer that has missed a command, or is being replaced: it loses nothing by it.
_HARMLESS = frozenset(
    {grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE}
)


class Siblings:
    """Calls of the other processes, over sockets that only this user reaches."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    def everyone(self) -> Sequence[int]:
        """The numbers of all processes, this one first."""
        return (self._place.number, *self._place.siblings)

    @property
    def others(self) -> Sequence[int]:
        """The numbers of the others."""
        return self._place.siblings

    async def ask(
        self, numbers: Iterable[int], call: Callable[[grpc.aio.Channel], Awaitable[T]]
    ) -> list[T | _Error]:
        """The answer of each, or the error with which it failed."""
        return await asyncio.gather(*(self._ask(number, call) for number in numbers))

    async def _ask(
        self, number: int, call: Callable[[grpc.aio.Channel], Awaitable[T]]
    ) -> T | _Error:
        # Connected anew each time: a channel that lasts would wait for its
        # next attempt long after the process at its end was replaced.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._place.grpc(number), options) as channel:
            try:
                return await call(channel)
            except _Error as error:
                return error

    async def abort(self, request: engine.AbortRequest) -> None:
        """Ends the requests with these ids wherever they run, this process left out."""
        answers = await self.ask(
            self.others, lambda c: VllmEngineStub(c).Abort(request, timeout=_TIMEOUT)
        )
        for answer in answers:
            if isinstance(answer, _Error) and answer.code() not in _HARMLESS:
                _log.warning("sibling_failed", call="Abort", why=answer.code().name)

    async def adopt(self, orders: Orders) -> None:
        """Does here what operators have told the others while this process was not there."""
        for answer in await self.ask(self.others, _orders_of):
            if not isinstance(answer, _Error):
                await orders.adopt(answer.workers)
        for told in await self.ask(self.others, _log_level_of):
            if not isinstance(told, _Error):
                orders.log_from(told.level)


async def _orders_of(channel: grpc.aio.Channel) -> admin.ListWorkersResponse:
    call: Any = channel.unary_unary(
        ORDERS_METHOD, response_deserializer=admin.ListWorkersResponse.FromString
    )
    answer: admin.ListWorkersResponse = await call(b"", timeout=_TIMEOUT)
    return answer


async def _log_level_of(channel: grpc.aio.Channel) -> admin.SetLogLevelResponse:
    stub: Any = router_pb2_grpc.RouterAdminStub(channel)
    answer: admin.SetLogLevelResponse = await stub.SetLogLevel(
        admin.SetLogLevelRequest(), timeout=_TIMEOUT
    )
    return answer


class AdminOfAll(router_pb2_grpc.RouterAdminServicer):
    """RouterAdmin for all processes. Explain is answered by this one alone."""

    def __init__(self, own: AdminService, siblings: Siblings) -> None:
        self._own = own
        self._siblings = siblings

    async def Explain(
        self, request: admin.ExplainRequest, context: Context
    ) -> admin.ExplainResponse:
        """What this process would do with a Generate."""
        return await self._own.Explain(request, context)

    async def ListWorkers(
        self, request: admin.ListWorkersRequest, context: Context
    ) -> admin.ListWorkersResponse:
        """Every worker that a process has, with the requests of all of them."""
        answers = await self._everywhere(
            lambda stub: stub.ListWorkers(request, timeout=_TIMEOUT), context
        )
        return admin.ListWorkersResponse(
            workers=merged_workers([worker for answer in answers for worker in answer.workers])
        )

    async def AddWorker(
        self, request: admin.AddWorkerRequest, context: Context
    ) -> admin.AddWorkerResponse:
        """Registers a worker, pending, at every process."""
        answers = await self._everywhere(
            lambda stub: stub.AddWorker(request, timeout=_TIMEOUT), context
        )
        return admin.AddWorkerResponse(worker=_merged([answer.worker for answer in answers]))

    async def DrainWorker(
        self, request: admin.DrainWorkerRequest, context: Context
    ) -> admin.DrainWorkerResponse:
        """Stops new requests for a worker; it goes from each process when it is idle there."""
        answers = await self._everywhere(
            lambda stub: stub.DrainWorker(request, timeout=_TIMEOUT), context
        )
        return admin.DrainWorkerResponse(worker=_merged([answer.worker for answer in answers]))

    async def RemoveWorker(
        self, request: admin.RemoveWorkerRequest, context: Context
    ) -> admin.RemoveWorkerResponse:
        """Takes a worker out of every process at once."""
        answers = await self._everywhere(
            lambda stub: stub.RemoveWorker(request, timeout=_TIMEOUT), context
        )
        return admin.RemoveWorkerResponse(worker=_merged([answer.worker for answer in answers]))

    async def SetLogLevel(
        self, request: admin.SetLogLevelRequest, context: Context
    ) -> admin.SetLogLevelResponse:
        """Changes what every process logs, or only tells it."""
        answers = await self._everywhere(
            lambda stub: stub.SetLogLevel(request, timeout=_TIMEOUT), context
        )
        first: admin.SetLogLevelResponse = answers[0]
        return first

    async def _everywhere(self, call: Callable[[Any], Awaitable[T]], context: Context) -> list[T]:
        """The answers of those that could; fails when none could, or one in a way of its own."""
        numbers = self._siblings.everyone
        answers = await self._siblings.ask(
            numbers, lambda channel: call(router_pb2_grpc.RouterAdminStub(channel))
        )
        done = [answer for answer in answers if not isinstance(answer, _Error)]
        failed = [
            (number, answer)
            for number, answer in zip(numbers, answers, strict=True)
            if isinstance(answer, _Error)
        ]
        if not done:
            first = failed[0][1]
            # With the reason that a fault has in the table.
            told = [(k, v) for k, v in first.trailing_metadata() or () if k == STATUS_DETAILS]
            await context.abort(first.code(), first.details() or "", tuple(told))
        for number, error in failed:
            if error.code() not in _HARMLESS:
                why = f"process {number}: {error.details()}; the others have done it"
                await context.abort(error.code(), why)
        return done


def sibling_handlers(
    orders: Orders, abort: Callable[[engine.AbortRequest], Awaitable[None]]
) -> tuple[grpc.GenericRpcHandler, ...]:
    """What siblings call beyond RouterAdmin: Abort for this process alone, and its orders."""

    async def serve_abort(raw: bytes, _: Context) -> bytes:
        await abort(engine.AbortRequest.FromString(raw))
        return engine.AbortResponse().SerializeToString()

    async def serve_orders(_raw: bytes, _: Context) -> bytes:
        return orders.standing().SerializeToString()

    unary = grpc.unary_unary_rpc_method_handler
    return tuple(
        grpc.method_handlers_generic_handler(service, {method: unary(serve)})
        for service, method, serve in (
            (ENGINE_SERVICE, "Abort", serve_abort),
            (ORDERS_SERVICE, ORDERS_METHOD.rpartition("/")[2], serve_orders),
        )
    )


def merged_workers(shown: Iterable[admin.Worker]) -> list[admin.Worker]:
    """One worker for each address, and another for those that only finish there."""
    grouped: dict[tuple[str, bool], list[admin.Worker]] = {}
    for worker in shown:
        key = worker.address, worker.state == admin.WorkerState.DRAINING
        grouped.setdefault(key, []).append(worker)
    return [_merged(views) for views in grouped.values()]


def _merged(views: Sequence[admin.Worker]) -> admin.Worker:
    """One worker as several processes see it: with the eyes of one that cannot use it, if any."""
    seen = next((v for v in views if v.state != admin.WorkerState.READY), views[0])
    worker = admin.Worker()
    worker.CopyFrom(seen)
    worker.load.in_flight = sum(v.load.in_flight for v in views)
    worker.load.reserved_tokens = sum(v.load.reserved_tokens for v in views)
    breakers = [v.load.breaker for v in views if v.load.breaker in _BREAKERS]
    if breakers:
        worker.load.breaker = max(breakers, key=_BREAKERS.index)
    return worker
