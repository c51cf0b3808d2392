"""Keeps one worker's event stream open, and the index in step with it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from router.observe.logging import get_logger
from router.prefix.changes import Lost
from router.prefix.events import EventReader, Loaded, Resync
from router.prefix.resident import Resident
from router.wire.common_pb2 import EngineLoad, KvEventBatch

_log = get_logger("prefix")

# Opens SubscribeKvEvents at number 0, which is the present: no worker keeps older ones.
OpenStream = Callable[[], AsyncGenerator[KvEventBatch, None]]


class StreamEnded(Exception):
    """The worker or the connection ended the stream; `code` is the gRPC status' name."""

    def __init__(self, code: str, details: str = "") -> None:
        super().__init__(f"{code}: {details}" if details else code)
        self.code = code


@dataclass(frozen=True)
class SubscriptionSettings:
    """Pauses in seconds between streams; they double while no batch comes.

    After `kept_for` seconds of them what was reported is void: a worker that
    was killed does not come back with its cache.
    """

    first_pause: float = 0.1
    longest_pause: float = 5.0
    kept_for: float = 3.0


class Subscription:
    """The owner of one worker's stream.

    `on_load` gets (rank, record) with each newer load record. `open_stream`
    raises `StreamEnded`, and its generator is closed whenever it is left.
    """

    def __init__(
        self,
        name: str,
        resident: Resident,
        open_stream: OpenStream,
        on_load: Callable[[int, EngineLoad], None],
        settings: SubscriptionSettings | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.reader = EventReader()
        self._name = name
        self._resident = resident
        self._open = open_stream
        self._on_load = on_load
        self._settings = settings or SubscriptionSettings()
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._pause = self._settings.first_pause
        # Seconds of pauses since the last batch.
        self._down = 0.0
        self._told_unavailable = False

    async def run(self) -> None:
        """Follows the stream until it is cancelled or the worker has no events to give.

        It may be called again when the worker may have some.

        What was reported is kept while the stream is down for a short time: the
        numbers of the next one tell whether it is still true.
        """
        while True:
            try:
                reason = await self._follow()
            except StreamEnded as end:
                reason = str(end)
                if end.code == "UNIMPLEMENTED":
                    if not self._told_unavailable:
                        _log.info("kv_events_unavailable", worker=self._name, index="approximate")
                    self._told_unavailable = True
                    return
                if end.code in ("DATA_LOSS", "OUT_OF_RANGE"):
                    self._forget()
            finally:
                self._resident.fall_silent()
            _log.debug("kv_events_again", worker=self._name, reason=reason)
            pause = self._pause * self._rng.uniform(0.8, 1.2)
            await self._sleep(pause)
            self._down += pause
            if self._down >= self._settings.kept_for:
                self._forget()
            self._pause = min(2 * self._pause, self._settings.longest_pause)

    def _forget(self) -> None:
        for rank in self.reader.lost():
            self._resident.apply(rank, Lost())

    async def _follow(self) -> str:
        """Reads one stream to its end; returns why it was left."""
        self.reader.opened()
        stream = self._open()
        try:
            async for batch in stream:
                self._resident.reporting = True
                self._pause = self._settings.first_pause
                self._down = 0.0
                for action in self.reader.apply(batch):
                    match action:
                        case Loaded(load=load):
                            self._on_load(batch.dp_rank, load)
                        case Resync(reason=reason):
                            _log.info("kv_events_gap", worker=self._name, reason=reason)
                            return reason
                        case _:
                            self._resident.apply(batch.dp_rank, action)
        finally:
            await stream.aclose()
        return "the worker ended the stream"
