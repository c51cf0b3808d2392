"""Keeps what is known of one worker true: metadata, health and load.

A worker is pending until its metadata were read, are those of the worker that
is expected there, and it says that it serves; asking goes on, with a growing
pause, for as long as it takes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, fields

import grpc

from router.fleet.bundle import BundleError
from router.fleet.health import HealthQuestions, NotServing, Streaks, WatchUnsupported
from router.fleet.introduction import Introduction, Introductions
from router.fleet.load import LoadSource
from router.fleet.model import ModelLibrary
from router.fleet.worker import Worker, WorkerState
from router.observe.logging import get_logger
from router.wire import engine

_log = get_logger("fleet")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
# Pause before a failed check is made again, where the interval is longer.
_CONFIRM_PAUSE = 0.2
# Seconds between readings of the metadata that requests ask for.
_REREAD_PAUSE = 0.5
# Seconds by which a timeout may be noticed late and still be the worker's.
_OWN_DELAY = 0.5


@dataclass(frozen=True)
class ProbeSettings:
    """Intervals and timeouts are in seconds.

    `health_timeout` is for one health check or load report; a worker with
    requests of ours that exceeds it is suspected at once. `engine_silence` is
    how long an engine may be without output in spite of having work.
    """

    health_interval: float = 3.0
    health_failures: int = 2
    health_successes: int = 1
    metadata_interval: float = 30.0
    load_interval: float = 1.0
    rpc_timeout: float = 5.0
    health_timeout: float = 2.0
    engine_silence: float = 60.0


class Probe:
    """Watches one worker until it is cancelled, or another engine stands at its address.

    `on_replaced` is told why, and has to stop this probe; it makes no more calls.
    """

    def __init__(
        self,
        worker: Worker,
        library: ModelLibrary,
        settings: ProbeSettings,
        clock: Callable[[], float],
        on_replaced: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._worker = worker
        self._settings = settings
        self._clock = clock
        self._on_replaced = on_replaced
        self._introductions = Introductions(library, clock, timeout=settings.rpc_timeout)
        self._known: Introduction | None = None
        self._streaks = Streaks(settings.health_failures, settings.health_successes)
        self._asked = False
        # The connection was lost since the metadata were read.
        self._reconnected = False
        self._last_good = True
        # How often the worker has said of itself that it does not serve.
        self._declined = 0
        self._read_at = 0.0
        self._checked_at = 0.0
        self._suspected = False
        self._wake = asyncio.Event()

    def reread(self) -> None:
        """Asks for the worker's capability to be read again, at once unless it just has been."""
        self._asked = True
        self._wake.set()

    def suspect(self) -> None:
        """Asks for a health check now: a call has failed, and the engine may be no more."""
        self._suspected = True
        self._wake.set()

    async def run(self) -> None:
        """Reads the metadata, then follows health, load and connection side by side."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_health())
            group.create_task(self._follow_watch())
            group.create_task(self._follow_load())
            group.create_task(self._follow_connection())

    # -- Metadata

    async def _introduce(self) -> None:
        pause = _FIRST_PAUSE
        while not await self._read() or not await self._serves():
            # Jitter, so that the workers of a restarted fleet are not asked in step.
            await self._sleep(pause * random.uniform(0.8, 1.2))
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        if self._worker.state is WorkerState.PENDING:
            self._worker.enter(WorkerState.READY, "metadata read and serving")

    async def _read(self) -> bool:
        reconnected, self._reconnected = self._reconnected, False
        try:
            found = await self._introductions.read(
                self._worker.stub, self._known, reconnected=reconnected
            )
        except (grpc.aio.AioRpcError, BundleError, ValueError) as error:
            self._reconnected |= reconnected
            self._bad(f"metadata: {_cause(error)}")
            return False
        if self._known is not None:
            why = self._known.identity.replaced_by(found.identity, reconnected=reconnected)
            if why is not None and self._worker.state is not WorkerState.PENDING:
                self._on_replaced(why)
                await asyncio.Event().wait()  # until this probe is cancelled
        self._known = found
        expected = self._worker.endpoint.model
        if expected not in ("", found.capability.served_name, found.capability.model_path):
            self._bad(f"it serves {found.capability.served_name}, not {expected}")
            return False
        self._take(found)
        self._read_at = self._clock()
        return True

    def _take(self, found: Introduction) -> None:
        worker = self._worker
        before, now = worker.capability, found.capability
        if before not in (None, now):
            names = [field.name for field in fields(now)]
            _log.info(
                "capability_changed",
                worker=worker.address,
                generation=worker.generation,
                changed=[name for name in names if getattr(before, name) != getattr(now, name)],
            )
        worker.learn(found.capability, found.model, found.model_info, found.server_info)

    # -- Health

    async def _follow_health(self) -> None:
        await self._introduce()
        while True:
            await self._sleep(self._pause())
            if self._asked:
                # A worker that refuses every request is not asked again for each.
                await asyncio.sleep(self._read_at + _REREAD_PAUSE - self._clock())
            if self._suspected:
                # Nor is one that fails every request.
                await asyncio.sleep(self._checked_at + _CONFIRM_PAUSE - self._clock())
            self._suspected = False
            asked, self._asked = self._asked, False
            healthy = await self._serves()
            due = self._clock() - self._read_at >= self._settings.metadata_interval
            unsure = self._reconnected or self._worker.state is WorkerState.UNHEALTHY
            if healthy and (asked or due or unsure):
                healthy = await self._read()
            if healthy:
                self._good()

    def _pause(self) -> float:
        interval = self._settings.health_interval
        confirming = self._worker.state is WorkerState.READY and not self._last_good
        return min(interval, _CONFIRM_PAUSE) if confirming else interval

    async def _serves(self) -> bool:
        """Asks once, and judges a bad answer; a good one is judged with what follows it."""
        asked_at, declined = self._clock(), self._declined
        self._checked_at = asked_at
        try:
            await HealthQuestions(self._worker.channel).check(self._settings.health_timeout)
        except NotServing as error:
            self._bad(f"health: {error}")
            return False
        except grpc.aio.AioRpcError as error:
            why = f"health: {_cause(error)}"
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._unanswered(asked_at, why)
            else:
                self._bad(why)
            return False
        self._worker.heard()
        if self._declined != declined:
            return False  # what it has said meanwhile is newer than this answer
        silence = self._worker.load.silence
        if silence >= self._settings.engine_silence:
            self._unhealthy(f"its engine has been silent for {silence:.0f}s with requests there")
            return False
        return True

    def _good(self) -> None:
        self._last_good = True
        recovered = self._streaks.good()
        if self._worker.state is WorkerState.UNHEALTHY and recovered:
            self._worker.enter(WorkerState.READY, "serving again")

    def _bad(self, why: str) -> None:
        self._last_good = False
        worker = self._worker
        if worker.state is WorkerState.PENDING:
            if worker.state_reason != why:
                worker.enter(WorkerState.PENDING, why)
                _log.warning("worker_pending", worker=worker.address, why=why)
        elif self._streaks.bad():
            self._unhealthy(why)

    def _unhealthy(self, why: str) -> None:
        if self._worker.state in (WorkerState.READY, WorkerState.UNHEALTHY):
            self._worker.enter(WorkerState.UNHEALTHY, why)

    def _unanswered(self, asked_at: float, why: str) -> None:
        """A question ran into its timeout.

        With requests of ours there, and no word from the worker since it was
        asked, more requests must not pile up while the count goes on.
        """
        worker = self._worker
        if self._clock() - asked_at > self._settings.health_timeout + _OWN_DELAY:
            # Our own loop was held up. To take that for an answer would lose the whole
            # fleet at once.
            _log.warning("probe_late", worker=worker.address, why=why)
            return
        if worker.load.in_flight and worker.heard_at <= asked_at:
            silence = self._clock() - worker.heard_at
            self._bad(why)
            self._unhealthy(f"suspected: no answer for {silence:.1f}s with requests there")
        else:
            self._bad(why)

    async def _follow_watch(self) -> None:
        """Hears of the worker's own changes at once; the timer's checks go on beside it."""
        while True:
            statuses = HealthQuestions(self._worker.channel).watch()
            try:
                async with aclosing(statuses):
                    async for status in statuses:
                        self._told(status)
            except WatchUnsupported:
                return
            except grpc.aio.AioRpcError as error:
                _log.debug("watch_ended", worker=self._worker.address, why=_cause(error))
            await asyncio.sleep(self._settings.health_interval)

    def _told(self, status: str) -> None:
        self._worker.heard()
        if status == "SERVING":
            if self._worker.state in (WorkerState.PENDING, WorkerState.UNHEALTHY):
                self._wake.set()
        elif self._worker.state is WorkerState.READY:
            # Its own word needs no confirmation.
            self._last_good = False
            self._declined += 1
            self._unhealthy(f"health: {status}")

    async def _follow_connection(self) -> None:
        while True:
            channel = self._worker.channel
            state = channel.get_state(try_to_connect=True)
            await channel.wait_for_state_change(state)
            now = channel.get_state()
            if state is grpc.ChannelConnectivity.READY:
                self._reconnected = True
                self._wake.set()
            elif now is grpc.ChannelConnectivity.READY and self._worker.state in (
                WorkerState.PENDING,
                WorkerState.UNHEALTHY,
            ):
                self._wake.set()

    # -- Load

    async def _follow_load(self) -> None:
        load, polls = self._worker.load, True
        while True:
            if self._worker.state in (WorkerState.READY, WorkerState.UNHEALTHY):
                if polls and not load.pushing:
                    polls = await self._poll_load()
                if (
                    load.silence >= self._settings.engine_silence
                    and self._worker.state is WorkerState.READY
                ):
                    self._wake.set()
            await asyncio.sleep(self._settings.load_interval)

    async def _poll_load(self) -> bool:
        """Asks for the load; False where the worker has no such report at all."""
        asked_at = self._clock()
        load = self._worker.load
        try:
            answer = await self._worker.stub.GetLoads(
                engine.GetLoadsRequest(), timeout=self._settings.health_timeout
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                load.no_report(LoadSource.UNKNOWN)
                _log.info("load_unknown", worker=self._worker.address, why="it has no GetLoads")
                return False
            load.no_report(LoadSource.FAILED)
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._unanswered(asked_at, f"load: {_cause(error)}")
            return True
        self._worker.heard()
        load.report_scheduler(answer)
        return True

    async def _sleep(self, seconds: float) -> None:
        """Sleeps, unless something happens that makes asking worth while at once."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass  # the usual case: nothing happened
        self._wake.clear()


def _cause(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details() or ''}"[:200]
    return str(error)[:200]
