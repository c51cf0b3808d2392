"""Several processes' views of a fleet as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import grpc

from router.faults import Fault, Reason
from router.rpc.errors import wire_error
from router.rpc.siblings import AdminOfAll, merged_workers
from router.wire import admin
from router.wire.router_pb2_grpc import RouterAdminStub, add_RouterAdminServicer_to_server
from tests.serving import refusal_of

READY, UNHEALTHY, DRAINING = (
    admin.WorkerState.READY,
    admin.WorkerState.UNHEALTHY,
    admin.WorkerState.DRAINING,
)


def worker(
    address: str, state: admin.WorkerState, in_flight: int, breaker: str = "closed"
) -> admin.Worker:
    return admin.Worker(
        address=address,
        state=state,
        reason=f"it is {admin.WorkerState.Name(state)}",
        load=admin.Load(in_flight=in_flight, reserved_tokens=10 * in_flight, breaker=breaker),
    )


def test_requests_are_added_and_trouble_of_one_process_is_shown() -> None:
    shown = merged_workers(
        [
            worker("a:1", READY, 2),
            worker("b:1", READY, 1),
            worker("a:1", UNHEALTHY, 3, "open"),
            worker("b:1", READY, 0, "half_open"),
        ]
    )
    assert [w.address for w in shown] == ["a:1", "b:1"]
    a, b = shown
    assert (a.state, a.reason, a.load.breaker) == (UNHEALTHY, "it is UNHEALTHY", "open")
    assert (a.load.in_flight, a.load.reserved_tokens) == (5, 50)
    assert (b.state, b.load.in_flight, b.load.breaker) == (READY, 1, "half_open")


def test_one_that_only_finishes_is_another_worker() -> None:
    shown = merged_workers(
        [worker("a:1", DRAINING, 1), worker("a:1", READY, 2), worker("a:1", DRAINING, 4)]
    )
    assert [(w.state, w.load.in_flight) for w in shown] == [(DRAINING, 5), (READY, 2)]


async def test_what_is_wrong_in_every_process_is_told_as_each_has_told_it() -> None:
    fault = wire_error(Fault(Reason.INTERNAL, "it failed"))
    failed = grpc.aio.AioRpcError(
        fault.code,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(*fault.trailers, ("x-own", "1")),
        fault.message,
    )

    class Everyone:
        everyone = (0, 1)

        async def ask(self, numbers: Sequence[int], _: object) -> list[grpc.aio.AioRpcError]:
            return [failed for _ in numbers]

    service = AdminOfAll(cast(Any, None), cast(Any, Everyone()))
    server = grpc.aio.server()
    add_RouterAdminServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            listing = RouterAdminStub(channel).ListWorkers(admin.ListWorkersRequest(), timeout=10)
            refused = await refusal_of(listing)
    finally:
        await server.stop(0)
    assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "x-own" not in dict(refused.trailers)
