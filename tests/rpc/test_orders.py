"""What operators have said, as a process learns it that starts later."""

from __future__ import annotations

from typing import Any, cast

from router.fleet.fleet import Fleet
from router.fleet.worker import Role, WorkerState
from router.request.explain import Explainer
from router.rpc.admin import Context
from router.rpc.orders import Orders
from router.wire import admin
from tests.fleet.running import fleet

# Nobody listens there.
ADDRESS = "127.0.0.1:9"
NO_CONTEXT = cast(Context, None)


def orders_of(running: Fleet) -> Orders:
    return Orders(running, cast(Explainer, None), running.registry.clock)


async def told(orders: Orders, role: Any, **labels: str) -> None:
    """A worker that was taken out, and added anew for another purpose."""
    remove = admin.RemoveWorkerRequest(address=ADDRESS)
    await orders.RemoveWorker(remove, NO_CONTEXT)
    add = admin.AddWorkerRequest(address=ADDRESS, role=role, labels=labels)
    await orders.AddWorker(add, NO_CONTEXT)


async def test_a_worker_that_was_added_anew_is_for_the_same_at_a_process_that_starts_later() -> (
    None
):
    async with fleet() as present, fleet() as late:
        for running in (present, late):
            running.add(ADDRESS)  # both have it from a source
        orders, adopting = orders_of(present), orders_of(late)
        await told(orders, admin.PREFILL, port="9000")
        await adopting.adopt(orders.standing().workers)
        adopted = late.registry.get(ADDRESS)
        assert adopted is not None
        assert (adopted.role, dict(adopted.labels)) == (Role.PREFILL, {"port": "9000"})
        # A second look finds it as it should be.
        await adopting.adopt(orders.standing().workers)
        assert late.registry.get(ADDRESS) is adopted


async def test_what_a_source_made_of_an_added_worker_since_is_what_is_passed_on() -> None:
    async with fleet() as present, fleet() as late:
        orders, adopting = orders_of(present), orders_of(late)
        add = admin.AddWorkerRequest(address=ADDRESS, role=admin.BOTH)
        await orders.AddWorker(add, NO_CONTEXT)
        worker = present.registry.get(ADDRESS)
        assert worker is not None
        present.drain(worker)
        present.add(ADDRESS, role=Role.DECODE)
        await adopting.adopt(orders.standing().workers)
        adopted = late.registry.get(ADDRESS)
        assert adopted is not None and adopted.role is Role.DECODE


async def test_a_worker_that_was_taken_out_goes_from_a_process_that_starts_later() -> None:
    async with fleet() as present, fleet() as late:
        for running in (present, late):
            running.add(ADDRESS)
        orders = orders_of(present)
        await orders.RemoveWorker(admin.RemoveWorkerRequest(address=ADDRESS), NO_CONTEXT)
        listed = late.registry.get(ADDRESS)
        await orders_of(late).adopt(orders.standing().workers)
        assert listed is not None and listed.state is WorkerState.GONE
        assert late.registry.get(ADDRESS) is None
