"""A worker's stream to the client, as raw bytes.

Token chunks pass without being parsed. Only a Complete is, since a stream is
whole when every choice had one. Chunks that wait for their client are joined:
see `merge.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from router.request import failure
from router.request.failure import Failure, Media
from router.request.merge import CHUNK, Outlet, Write
from router.request.tally import TokenTally
from router.wire import engine

__all__ = ["AttemptFailed", "ClientGone", "Limits", "Progress", "Write", "stream", "tell"]


# Seconds in which a worker has to end a stream after its last Complete; nobody waits longer.
_CLOSING = 1.0


class AttemptFailed(Exception):
    """An attempt came to no good end.

    `grown` says that the request was made longer by so many prompt tokens, to
    go on from where this attempt broke off.
    """

    def __init__(self, why: Failure, *, grown: int = 0) -> None:
        super().__init__(why.fault.message)
        self.why = why
        self.grown = grown


def _never() -> float:
    return 0.0


@dataclass(slots=True)
class Progress:
    """How far a relay has come, readable while it runs and after it ended.

    Moments are monotonic seconds.
    """

    messages: int = 0
    # Of them, those that went to the client as a part of another.
    joined: int = 0
    nbytes: int = 0
    tally: TokenTally = field(default_factory=TokenTally)
    completes: set[int] = field(default_factory=set)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    first_output_at: float | None = None
    # When the last message came, whether it is still being written, and when it had been.
    last_at: float = 0.0
    writing: bool = False
    passed_at: float = 0.0

    # Seconds that the worker has been silent to everybody.
    worker_silence: Callable[[], float] = _never
    # Ids that came in Completes alone.
    unstreamed: int = 0

    @property
    def started(self) -> bool:
        return self.messages > 0

    def whole(self, choices: int) -> bool:
        """Whether each of so many choices has completed; others do not count."""
        # Counted first: there may be thousands, and each Complete asks.
        return len(self.completes) >= choices and self.completes.issuperset(range(choices))

    @property
    def output_tokens(self) -> int:
        """Ids that went to the client."""
        return self.tally.tokens + self.unstreamed


@dataclass(frozen=True)
class Limits:
    """Longest waits of one attempt, in seconds."""

    connect: float = 5.0
    first_output: float = 300.0
    idle: float = 120.0
    # Of an unhealthy worker, to everybody: its health checks are not answered either.
    silence: float = 10.0


class ClientGone(Exception):
    """A message could not be passed on: nobody is there to read it."""


async def tell(write: Write, message: bytes) -> None:
    """Writes a message of the router's own. Raises `ClientGone`."""
    try:
        await write(message)
    except grpc.aio.InternalError as error:
        # A write that waits for the client's window fails so when the client leaves.
        raise ClientGone from error


class Watchdog:
    """Cancels a call whose worker stays silent too long.

    One timer a stream, set anew when it fires: a message costs no more than
    noting the time. A client that reads slowly is not a silent worker.
    """

    def __init__(
        self,
        call: grpc.aio.Call,
        progress: Progress,
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._call = call
        self._progress = progress
        self._limits = limits
        self._loop = loop
        self.expired: tuple[str, float] | None = None
        self._began = monotonic()
        self._look_in(self._soon(limits.first_output))

    def _look(self) -> None:
        progress, limits, now = self._progress, self._limits, monotonic()
        if progress.worker_silence() >= limits.silence:
            self._expire("silence", limits.silence)
            return
        if progress.writing:
            self._look_in(self._soon(limits.idle))
            return
        if progress.started:
            limit, seconds, left = "idle", limits.idle, limits.idle - (now - progress.passed_at)
        else:
            limit, seconds = "first_output", limits.first_output
            left = limits.first_output - (now - self._began)
        if left <= 0:
            self._expire(limit, seconds)
        else:
            self._look_in(self._soon(left))

    def _soon(self, seconds: float) -> float:
        # Output may come at once, and then the idle limit counts; a worker may fall silent.
        return min(seconds, self._limits.idle, self._limits.silence)

    def _look_in(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._look)

    def _expire(self, limit: str, seconds: float) -> None:
        self.expired = limit, seconds
        self._call.cancel()

    def stop(self) -> None:
        self._timer.cancel()


async def stream(
    call: grpc.aio.UnaryStreamCall[Any, bytes],
    write: Write,
    *,
    choices: int,
    limits: Limits,
    progress: Progress,
    media: Media,
    on_first: Callable[[], None],
    through: Callable[[bytes], bytes] | None = None,
    merge: bool = False,
) -> None:
    """Relays until every one of `choices` has completed and the stream has ended.

    `on_first` is called before the first message is passed on. `through` sees,
    and may change, each message on its way. With `merge`, chunks that wait are
    joined. `media` is what the worker has to read. Raises `AttemptFailed`;
    CancelledError or `ClientGone` when the client is gone. Whatever happens, the
    call is over when this returns.
    """
    outlet = Outlet(write, progress, choices=choices, on_failure=call.cancel) if merge else None
    loop = asyncio.get_running_loop()
    watchdog = Watchdog(call, progress, limits, loop)
    ending: asyncio.TimerHandle | None = None
    count_tokens = progress.tally.add
    try:
        try:
            async for message in call:
                came_at = progress.last_at = monotonic()
                if message[:1] == CHUNK:
                    if ending is not None:
                        continue  # every choice is over
                    count_tokens(message)
                else:
                    if not _note_complete(message, progress):
                        continue
                    if ending is None and progress.whole(choices):
                        # The worker has a moment to close what is whole.
                        ending = loop.call_later(_CLOSING, call.cancel)
                if not progress.messages:
                    progress.first_output_at = came_at
                    on_first()
                progress.messages += 1
                progress.nbytes += len(message)
                if through is not None:
                    message = through(message)
                if outlet is not None and outlet.gathering:
                    await outlet.put(message)
                    continue
                progress.writing = True
                await write(message)
                progress.writing = False
                # Silence begins here: a worker cannot be heard while its client is slow to read.
                before, progress.passed_at = progress.passed_at, monotonic()
                if outlet is not None:
                    outlet.passed(before, came_at, progress.passed_at)
        finally:
            # However the worker's side ended, what came of it goes to the client first.
            if outlet is not None and not being_cancelled():
                await outlet.finish()
    except grpc.aio.InternalError as error:
        if not progress.writing:
            raise
        raise ClientGone from error
    except DecodeError as error:
        raise AttemptFailed(failure.unreadable(started=progress.started)) from error
    except grpc.aio.AioRpcError as error:
        # With every choice complete the client has all there is; how the call ended is nothing.
        if not progress.whole(choices):
            raise AttemptFailed(
                failure.of_call(
                    error,
                    started=progress.started,
                    media=media,
                    time_left=call.time_remaining() or 0.0,
                )
            ) from error
    except asyncio.CancelledError:
        if being_cancelled():
            raise
        if not progress.whole(choices):
            if watchdog.expired is None:
                raise AttemptFailed(failure.removed(started=progress.started)) from None
            why = failure.timed_out(*watchdog.expired, started=progress.started)
            raise AttemptFailed(why) from None
    finally:
        watchdog.stop()
        if ending is not None:
            ending.cancel()
        call.cancel()
        if outlet is not None:
            await outlet.close()
    if not progress.whole(choices):
        raise AttemptFailed(failure.incomplete(started=progress.started))


def _note_complete(message: bytes, progress: Progress) -> bool:
    """False for a second Complete of a choice, which no client expects."""
    response = engine.GenerateResponse.FromString(message)
    if not response.HasField("complete"):
        return True
    complete = response.complete
    if complete.index in progress.completes:
        return False
    progress.completes.add(complete.index)
    progress.prompt_tokens = max(progress.prompt_tokens, complete.prompt_tokens)
    progress.cached_tokens = max(progress.cached_tokens, complete.cached_tokens)
    progress.finish_reasons.append(complete.finish_reason)
    if not progress.tally.tokens:
        # Without chunks before it, a Complete holds all ids of its choice.
        progress.unstreamed += len(complete.output_ids)
    return True


def being_cancelled() -> bool:
    """Whether it is this task that is being cancelled, and not a call that it awaits.

    A call is cancelled on its own when its channel is closed.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def connect(channel: grpc.aio.Channel, limit: float) -> None:
    """Waits until the channel is connected. Raises `AttemptFailed` after `limit` seconds."""
    state = channel.get_state(try_to_connect=True)
    if state is grpc.ChannelConnectivity.READY:
        return
    try:
        async with asyncio.timeout(limit):
            while state is not grpc.ChannelConnectivity.READY:
                if state in (
                    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                    grpc.ChannelConnectivity.SHUTDOWN,
                ):
                    # The call itself then says what is wrong, at once.
                    return
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        raise AttemptFailed(failure.timed_out("connect", limit, started=False)) from None
