"""A process that crashes again and again."""

from __future__ import annotations

import asyncio
import gc
import signal

import pytest

from router import config
from router.supervise import supervisor as module
from router.supervise.merge import parsed
from router.supervise.place import Place
from router.supervise.supervisor import CannotServe, Supervisor

COUNTED = "# TYPE router_requests_total counter\nrouter_requests_total 1\n"


class ShortLived:
    """A process that serves one request and dies; at once when it is not `well`."""

    pid = 7

    def __init__(self, place: Place, well: bool) -> None:
        self.number = place.number
        self.listens = False
        self.metrics = COUNTED
        self._well = well

    async def up(self) -> bool:
        return self._well

    async def ended(self) -> int:
        return -signal.SIGSEGV

    def send(self, number: signal.Signals) -> None:
        raise AssertionError("it is dead")

    async def read_metrics(self, timeout: float) -> bool:
        return True


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """Where processes were started; all of them are short-lived."""
    started: list[Place] = []

    async def start(place: Place, settings: config.Settings) -> ShortLived:
        started.append(place)
        return ShortLived(place, well=place.number == 0)

    monkeypatch.setattr(module.Child, "start", start)
    return started


async def test_pauses_grow_and_nothing_piles_up(
    places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor(config.load({"processes": 2}))
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 50:
            supervisor.stop()

    monkeypatch.setattr(supervisor, "_stopped_within", pause)
    await supervisor._keep(Place(0, 2, "/nowhere"), supervisor._settings, asyncio.Event())
    assert pauses[:9] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10])
    assert set(pauses[9:]) == {10}
    assert [place.replacement for place in places] == [False] + 49 * [True]
    assert not supervisor.processes.living
    text, _ = await supervisor.processes.render("")
    values = {
        s.name: s.value
        for family in parsed(text.decode())
        for s in family.samples
        if s.name.startswith("router_")
    }
    assert values == {
        "router_requests_total": 50,
        "router_process_restarts_total": 50,
        "router_processes": 0,
    }


async def test_one_that_never_came_up_is_not_tried_again(places: list[Place]) -> None:
    supervisor = Supervisor(config.load({"processes": 2}))
    with pytest.raises(CannotServe, match="process 1 did not start: SIGSEGV"):
        await supervisor._keep(Place(1, 2, "/nowhere"), supervisor._settings, asyncio.Event())
    assert len(places) == 1


async def test_a_stop_before_all_are_up_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor = Supervisor(config.load({"processes": 2}))

    class Starting(ShortLived):
        """One that lives until it is told to end; the second does not come up before."""

        def __init__(self, place: Place) -> None:
            super().__init__(place, well=place.number == 0)
            self._told = asyncio.Event()

        async def up(self) -> bool:
            if not self._well:
                supervisor.stop()
                await self._told.wait()
            return self._well

        async def ended(self) -> int:
            await self._told.wait()
            return 0

        def send(self, number: signal.Signals) -> None:
            self._told.set()

    async def start(place: Place, settings: config.Settings) -> Starting:
        return Starting(place)

    monkeypatch.setattr(module.Child, "start", start)
    errors: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["message"]))
    await supervisor._keep_all("/nowhere", supervisor._settings, "")
    gc.collect()
    assert errors == []
