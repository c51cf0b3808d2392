"""The fleet is what the sources say, whatever it was before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from router.fleet.breaker import CallResult
from router.fleet.discovery.reconcile import Reconciler
from router.fleet.discovery.static import StaticDiscovery
from router.fleet.endpoint import Endpoint, Role
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker, WorkerState
from tests.fleet.running import fleet, sim
from tests.serving import eventually

# Nobody listens at these.
A, B, C = (Endpoint(f"127.0.0.1:{port}") for port in (1, 2, 3))


def standing(running: Fleet) -> list[str]:
    return [w.address for w in running.registry if w.state is not WorkerState.DRAINING]


async def test_the_whole_set_is_what_counts() -> None:
    async with fleet() as running:
        reconciler = Reconciler(running, [])
        reconciler.take("s", [A, B])
        assert standing(running) == [A.address, B.address]
        kept = running.registry.get(B.address)
        reconciler.take("s", [B, C])
        assert standing(running) == [B.address, C.address]
        assert running.registry.get(B.address) is kept
        reconciler.take("s", [])
        assert standing(running) == []
        await eventually(lambda: len(running.registry) == 0)


async def test_sources_add_up_and_each_takes_back_only_its_own() -> None:
    async with fleet() as running:
        reconciler = Reconciler(running, [])
        reconciler.take("one", [A, B])
        reconciler.take("two", [B, C])
        assert set(standing(running)) == {A.address, B.address, C.address}
        reconciler.take("one", [])
        assert set(standing(running)) == {B.address, C.address}


async def test_a_set_that_could_not_be_taken_whole_is_taken_the_next_time() -> None:
    async with fleet() as running:
        reconciler, admit = Reconciler(running, []), running.admit

        def failing(endpoint: Endpoint) -> Worker:
            if endpoint == B:
                raise OSError("too many open files")
            return admit(endpoint)

        running.admit = failing  # type: ignore[method-assign]
        with suppress(OSError):
            reconciler.take("s", [A, B, C])
        assert standing(running) == [A.address]
        kept = running.registry.get(A.address)
        running.admit = admit  # type: ignore[method-assign]
        reconciler.take("s", [A, B, C])
        assert standing(running) == [A.address, B.address, C.address]
        assert running.registry.get(A.address) is kept


async def test_workers_added_by_command_are_left_alone() -> None:
    async with fleet() as running:
        reconciler = Reconciler(running, [])
        running.add(C.address)
        reconciler.take("s", [A])
        reconciler.take("s", [])
        assert standing(running) == [C.address]


async def test_a_worker_drained_by_command_does_not_come_back_by_the_next_set() -> None:
    async with fleet() as running:
        reconciler = Reconciler(running, [])
        reconciler.take("s", [A])
        drained = running.registry.get(A.address)
        assert drained is not None
        running.drain(drained)
        await eventually(lambda: drained.state is WorkerState.GONE)
        reconciler.take("s", [A, B])
        assert standing(running) == [B.address]
        reconciler.take("s", [B])
        reconciler.take("s", [A, B])
        assert set(standing(running)) == {A.address, B.address}


async def test_new_labels_are_taken_on_and_a_new_role_is_a_new_generation() -> None:
    async with fleet() as running:
        reconciler = Reconciler(running, [])
        reconciler.take("s", [Endpoint(A.address, labels={"zone": "a"})])
        first = running.registry.get(A.address)
        assert first is not None
        reconciler.take("s", [Endpoint(A.address, labels={"zone": "b"})])
        assert running.registry.get(A.address) is first
        assert dict(first.labels) == {"zone": "b"}
        reconciler.take("s", [Endpoint(A.address, Role.DECODE, labels={"zone": "b"})])
        second = running.registry.get(A.address)
        assert second is not None
        assert second is not first
        assert second.role is Role.DECODE
        assert first.state is not WorkerState.READY


async def test_a_worker_that_flaps_keeps_its_streams_and_counts_none_of_them_twice() -> None:
    async with sim() as worker, fleet() as running:
        reconciler = Reconciler(running, [])
        here = Endpoint(worker.address)
        reconciler.take("s", [here])
        old = running.registry.get(worker.address)
        assert old is not None
        await eventually(lambda: old.state is WorkerState.READY)
        lease = old.lease(3)
        assert lease is not None
        reconciler.take("s", [])
        reconciler.take("s", [here])
        new = running.registry.get(worker.address)
        assert new is not None
        assert new is not old
        await eventually(lambda: new.state is WorkerState.READY)
        assert (old.load.in_flight, new.load.in_flight) == (1, 0)
        lease.release(CallResult.SUCCESS)
        await eventually(lambda: list(running.registry) == [new])
        assert new.load.in_flight == 0


class Failing:
    """A source that fails once for a reason of ours."""

    name = "failing"

    def __init__(self) -> None:
        self.began = 0

    async def sets(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        self.began += 1
        if self.began == 1:
            raise RuntimeError("a mistake")
        yield [A]
        await asyncio.Event().wait()


async def test_a_source_that_fails_is_started_again_and_disturbs_no_other() -> None:
    async with fleet() as running:
        sources = [Failing(), StaticDiscovery([B])]
        task = asyncio.create_task(Reconciler(running, sources).run())
        await eventually(lambda: set(standing(running)) == {A.address, B.address})
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
