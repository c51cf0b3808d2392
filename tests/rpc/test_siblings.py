"""Several processes' views of a fleet as one."""

from __future__ import annotations

from router.rpc.siblings import merged_workers
from router.wire import admin

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
