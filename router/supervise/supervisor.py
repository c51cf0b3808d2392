"""Starts router processes, replaces those that crash, and ends them all."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace

from router.config import Settings
from router.observe.logging import announce, get_logger
from router.supervise.child import Child
from router.supervise.face import Face
from router.supervise.place import Place
from router.supervise.port import hold
from router.supervise.processes import Processes

_log = get_logger("supervise")

# Pauses before a process that crashed is started again, while it keeps crashing.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
# One that has lived so long did not crash for the same reason as the one before.
_LONG_LIVED = 60.0
# What a process gets beyond its drain, or after it was told to stop at once.
_GRACE = 10.0
# What a process has counted since the last reading is lost when it is killed.
_READING_INTERVAL = 5.0


class CannotServe(Exception):
    """The processes cannot be started; the message says why."""


class Supervisor:
    """`settings.processes` routers on one port, until `stop` was called and all have ended."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self.processes = Processes(settings.processes)

    def stop(self) -> None:
        """Begins to drain; a second call ends everything at once."""
        if self._stop.is_set():
            self._stop_now.set()
        self.processes.stopping = True
        self._stop.set()

    async def run(self) -> None:
        """Serves until stopped. Raises `CannotServe`."""
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(_folder())
            settings = self._settings
            listen = stack.enter_context(_held(settings.listen))
            admin = settings.admin
            if admin and not admin.startswith("unix:"):
                admin = stack.enter_context(_held(admin))
            face = Face(self.processes)
            if settings.http:
                try:
                    await face.start(settings.http)
                except (OSError, ValueError) as error:
                    raise CannotServe(f"cannot serve HTTP on {settings.http}: {error}") from error
                stack.push_async_callback(face.stop)
            shared = settings.model_copy(update={"listen": listen, "admin": admin})
            reading = asyncio.create_task(self.processes.keep_reading(_READING_INTERVAL))
            stack.push_async_callback(_ended, reading)
            await self._keep_all(folder, shared, face.address)

    async def _keep_all(self, folder: str, settings: Settings, http: str) -> None:
        count = settings.processes
        keepers: list[asyncio.Task[None]] = []
        up = [asyncio.Event() for _ in range(count)]

        def keep(number: int) -> None:
            place = Place(number, count, folder)
            keepers.append(asyncio.create_task(self._keep(place, settings, up[number])))

        # The first goes ahead: what keeps it from starting would keep all of
        # them, and the kernels that it compiles are there for the others.
        keep(0)
        ending = asyncio.create_task(self._end(keepers))
        try:
            if await self._any(up[0].wait(), *keepers):
                for number in range(1, count):
                    keep(number)
                if await self._any(_all_set(up), *keepers) and not self._stop.is_set():
                    _log.info("supervising", grpc=settings.listen, http=http, processes=count)
                    announce(settings.listen)
            # Each keeps on until it is told to stop; one that fails says so by ending.
            await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Those that still drain go on draining: this is no second signal.
            if not self._stop.is_set():
                self.stop()
            await ending
            await asyncio.wait(keepers)
        for keeper in keepers:
            keeper.result()

    @staticmethod
    async def _any(wanted: object, *keepers: asyncio.Task[None]) -> bool:
        """Waits for `wanted`, or until a keeper has ended; whether it was the former."""
        waiting = asyncio.ensure_future(wanted)  # type: ignore[call-overload]
        await asyncio.wait([waiting, *keepers], return_when=asyncio.FIRST_COMPLETED)
        done = bool(waiting.done())
        waiting.cancel()
        return done

    async def _keep(self, place: Place, settings: Settings, up: asyncio.Event) -> None:
        """One process after the other at a place. Raises `CannotServe` if the first fails."""
        pause = _FIRST_PAUSE
        own = settings.model_copy(update={"http": place.http})
        while not self._stop.is_set():
            began = time.monotonic()
            why = await self._live(place, own, up)
            if self._stop.is_set():
                return
            if not up.is_set():
                raise CannotServe(f"process {place.number} did not start: {why}")
            if time.monotonic() - began > _LONG_LIVED:
                pause = _FIRST_PAUSE
            self.processes.restarts.inc()
            _log.error("process_ended", process=place.number, why=why, again_in=pause)
            await self._stopped_within(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            place = replace(place, replacement=True)

    async def _live(self, place: Place, settings: Settings, up: asyncio.Event) -> str:
        """The life of one process; why it ended."""
        try:
            child = await Child.start(place, settings)
        except OSError as error:
            return f"not started: {error.strerror}"
        self.processes.add(child)
        if self._stop.is_set():
            child.send(signal.SIGTERM)
        if await child.up():
            up.set()
            if place.replacement:
                _log.info("process_replaced", process=place.number, pid=child.pid)
        code = await child.ended()
        self.processes.remove(child)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    async def _end(self, keepers: list[asyncio.Task[None]]) -> None:
        """Passes the signals on, and kills what does not end."""
        await self._stop.wait()
        _log.info("draining", processes=len(self.processes.living))
        self._send_all(signal.SIGTERM)
        ended = asyncio.ensure_future(asyncio.wait(keepers))
        told = asyncio.create_task(self._stop_now.wait())
        bound = self._settings.drain_timeout + _GRACE
        await asyncio.wait([ended, told], timeout=bound, return_when=asyncio.FIRST_COMPLETED)
        if told.done() and not ended.done():
            self._send_all(signal.SIGTERM)
            await asyncio.wait([ended], timeout=_GRACE)
        told.cancel()
        for child in self.processes.living if not ended.done() else ():
            _log.warning("process_killed", process=child.number, pid=child.pid)
            child.send(signal.SIGKILL)
        await ended

    def _send_all(self, number: signal.Signals) -> None:
        for child in self.processes.living:
            child.send(number)

    async def _stopped_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            pass


async def _all_set(events: Sequence[asyncio.Event]) -> None:
    # A gather that is cancelled keeps an exception that nobody reads, and that is logged.
    for event in events:
        await event.wait()


async def serve(settings: Settings) -> None:
    """Runs the supervisor until SIGTERM, SIGINT or SIGHUP. Raises `CannotServe`."""
    supervisor = Supervisor(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop)
    await supervisor.run()


@contextmanager
def _folder() -> Iterator[str]:
    """For the processes' sockets, entered by this user only, and gone at the end."""
    try:
        folder = tempfile.mkdtemp(prefix="mmrouter-")
    except OSError as error:
        raise CannotServe(f"no folder for the processes' sockets: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _held(address: str) -> Iterator[str]:
    try:
        bound, held = hold(address)
    except (OSError, ValueError) as error:
        raise CannotServe(f"cannot listen on {address}: {error}") from error
    with held:
        yield bound


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
