"""Places for requests: never too many, first come first served, none lost."""

from __future__ import annotations

import asyncio

import pytest

from router.faults import Fault, Reason
from router.request.admission import Admission
from tests.serving import eventually


class Crowd:
    """Requests that hold their place until they are let go."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.active = self.most = 0
        self.order: list[int] = []
        self._gates: dict[int, asyncio.Event] = {}

    async def hold(self, name: int) -> None:
        gate = self._gates[name] = asyncio.Event()
        async with self.admission.place():
            self.active += 1
            self.most = max(self.most, self.active)
            self.order.append(name)
            try:
                await gate.wait()
            finally:
                self.active -= 1

    def start(self, name: int) -> asyncio.Task[None]:
        return asyncio.create_task(self.hold(name))

    def let_go(self, name: int) -> None:
        self._gates[name].set()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_five_waves_of_three_never_have_two_at_work() -> None:
    crowd = Crowd(Admission(1, queue_size=100, queue_timeout=60))
    tasks: list[asyncio.Task[None]] = []
    for wave in range(5):
        tasks += [crowd.start(3 * wave + i) for i in range(3)]
        await settle()
        # One leaves as the next wave arrives.
        crowd.let_go(crowd.order[-1])
    for _ in range(15):
        await settle()
        crowd.let_go(crowd.order[-1])
    await asyncio.gather(*tasks)
    assert crowd.most == 1
    assert crowd.order == list(range(15))
    assert crowd.admission.active == 0
    assert crowd.admission.idle.is_set()


async def test_a_full_queue_refuses_at_once_and_names_its_limits() -> None:
    crowd = Crowd(Admission(1, queue_size=1, queue_timeout=60))
    tasks = [crowd.start(0), crowd.start(1)]
    await settle()
    with pytest.raises(Fault) as refused:
        await crowd.hold(2)
    assert refused.value.reason is Reason.ADMISSION_FULL
    assert refused.value.metadata == {"max_concurrent": "1", "queue_size": "1"}
    assert crowd.admission.waiting == 1
    for name in (0, 1):
        crowd.let_go(name)
        await settle()
    await asyncio.gather(*tasks)


async def test_a_wait_has_an_end_and_leaves_no_trace() -> None:
    crowd = Crowd(Admission(1, queue_size=5, queue_timeout=0.01))
    first = crowd.start(0)
    await settle()
    with pytest.raises(Fault) as refused:
        await crowd.hold(1)
    assert refused.value.reason is Reason.ADMISSION_FULL
    assert crowd.admission.waiting == 0
    crowd.let_go(0)
    await first
    assert crowd.admission.active == 0


async def test_a_waiter_that_leaves_is_passed_over() -> None:
    crowd = Crowd(Admission(1, queue_size=5, queue_timeout=60))
    tasks = [crowd.start(i) for i in range(3)]
    await settle()
    tasks[1].cancel()
    await settle()
    assert crowd.admission.waiting == 1
    crowd.let_go(0)
    await settle()
    assert crowd.order == [0, 2]
    crowd.let_go(2)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert crowd.admission.active == 0


@pytest.mark.parametrize("others", [0, 1])
async def test_a_place_that_comes_as_its_waiter_leaves_goes_to_the_next(others: int) -> None:
    crowd = Crowd(Admission(1, queue_size=5, queue_timeout=60))
    gate = asyncio.Event()

    async def leave_and_cancel_the_next() -> None:
        async with crowd.admission.place():
            await gate.wait()
        # The place was handed over, and its waiter has not run since.
        assert crowd.admission.active == 1
        tasks[0].cancel()

    first = asyncio.create_task(leave_and_cancel_the_next())
    await settle()
    tasks = [crowd.start(i) for i in range(1 + others)]
    await settle()
    gate.set()
    await first
    await settle()
    assert tasks[0].cancelled()
    assert crowd.order == [1] * others
    if others:
        crowd.let_go(1)
        await tasks[1]
    assert crowd.admission.active == 0
    assert crowd.admission.idle.is_set()


async def test_a_place_that_comes_as_time_runs_out_is_not_lost() -> None:
    loop = asyncio.get_running_loop()
    for delay in (0.004, 0.005, 0.006):
        admission = Admission(1, queue_size=50, queue_timeout=0.005)
        crowd = Crowd(admission)
        tasks = [crowd.start(i) for i in range(20)]
        await settle()
        for name in range(20):
            loop.call_later(delay, crowd.let_go, name)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(e) for e in ended} <= {type(None), Fault}
        assert (admission.active, admission.waiting) == (0, 0)
        assert admission.idle.is_set()


async def test_draining_refuses_those_that_come_and_those_that_wait_but_not_those_at_work() -> None:
    crowd = Crowd(Admission(1, queue_size=5, queue_timeout=60))
    first, second = crowd.start(0), crowd.start(1)
    await settle()
    crowd.admission.stop()
    with pytest.raises(Fault) as waited:
        await second
    with pytest.raises(Fault) as came:
        await crowd.hold(2)
    assert waited.value.reason is came.value.reason is Reason.DRAINING
    assert not crowd.admission.idle.is_set()
    crowd.let_go(0)
    await first
    await asyncio.wait_for(crowd.admission.idle.wait(), 1)


async def test_a_request_that_fails_gives_its_place_back() -> None:
    admission = Admission(1, queue_size=0, queue_timeout=0)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            async with admission.place():
                raise RuntimeError
    assert admission.active == 0


async def test_waits_are_told() -> None:
    waits: list[float] = []
    crowd = Crowd(Admission(1, 5, 60, waits.append))
    tasks = [crowd.start(0), crowd.start(1)]
    await settle()
    assert waits == [0.0]
    crowd.let_go(0)
    await eventually(lambda: len(waits) == 2)
    assert waits[1] >= 0
    crowd.let_go(1)
    await asyncio.gather(*tasks)
