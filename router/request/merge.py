"""Chunks that wait for the same client become one message.

Passing a message on costs the same whatever is in it, so when messages come
faster than they can be passed on, those of one choice go out together. While
nothing waits, each is passed on as it came, at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from time import monotonic
from typing import Protocol

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from router.wire import engine

# The tag of GenerateResponse.chunk: field 1, length-delimited. A message that
# begins otherwise is no chunk.
CHUNK = b"\n"

Write = Callable[[bytes], Awaitable[None]]

# Messages in a row that were there before the one ahead of them had long been passed on,
# beyond what one step of every choice brings, until waiting ones are gathered.
_STREAK = 8
# Such a message came within so many times what passing on the one ahead took.
_SOON = 3.0
# Gathering lasts so many times what passing on a message takes: with the cost of a write
# near that of a read, most of what writing costs is gone by then.
_GATHER = 12.0
_LONGEST_GATHER = 0.05
# What is held of one stream, before its worker is kept waiting.
_MOST_MESSAGES = 64
_MOST_BYTES = 256 << 10


class Flow(Protocol):
    """What others want to know of the writing, as it happens."""

    writing: bool
    passed_at: float
    joined: int


class Outlet:
    """A stream's way to its client.

    As long as `gathering` is false, messages are written by whoever reads them,
    who tells `passed` how that went. When it shows that messages wait, they go
    to `put` until none does any more: a task of this outlet then writes what
    gathers. A write that fails there calls `on_failure`, and is raised by the
    next `put` or by `finish`.
    """

    __slots__ = (
        "_enough",
        "_flow",
        "_gathered",
        "_loop",
        "_nbytes",
        "_on_failure",
        "_pause",
        "_streak",
        "_task",
        "_took",
        "_write",
        "gathering",
    )

    def __init__(
        self, write: Write, flow: Flow, *, choices: int, on_failure: Callable[[], object]
    ) -> None:
        self.gathering = False
        self._write = write
        self._flow = flow
        self._on_failure = on_failure
        self._enough = _STREAK + choices
        self._loop = asyncio.get_running_loop()
        self._streak = 0
        self._took = 0.0
        self._gathered: list[bytes] = []
        self._nbytes = 0
        self._task: asyncio.Task[None] | None = None
        self._pause: asyncio.Future[None] | None = None

    def passed(self, before: float, came_at: float, passed_at: float) -> None:
        """Notes a message: when the one before was passed on, and when it came and was itself.

        All in monotonic seconds.
        """
        took = passed_at - came_at
        if came_at - before > _SOON * took:
            self._streak = 0
            return
        self._streak += 1
        if self._streak >= self._enough:
            self.gathering, self._took = True, took

    async def put(self, message: bytes) -> None:
        """Takes a message while gathering; waits for room."""
        if self._task is not None and self._task.done():
            # Nothing goes out behind what could not be written.
            self._task.result()
        self._gathered.append(message)
        self._nbytes += len(message)
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._write_gathered(), name="write gathered")
            self._task.add_done_callback(self._ended)
        full = len(self._gathered) >= _MOST_MESSAGES or self._nbytes >= _MOST_BYTES
        if full or message[:1] != CHUNK:
            # Ends are not kept waiting.
            self._go()
        if full:
            await self._task

    async def finish(self) -> None:
        """Writes what is left."""
        if self._task is not None:
            self._go()
            await self._task

    async def close(self) -> None:
        """Drops what is left; when this returns nothing is being written."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _write_gathered(self) -> None:
        flow = self._flow
        while self._gathered:
            await self._rest(flow.passed_at + min(_LONGEST_GATHER, _GATHER * self._took))
            waiting, self._gathered, self._nbytes = self._gathered, [], 0
            began = monotonic()
            out = merged(waiting)
            flow.writing = True
            for message in out:
                await self._write(message)
            flow.writing = False
            flow.passed_at = monotonic()
            flow.joined += len(waiting) - len(out)
            self._took = (flow.passed_at - began) / len(out)
            if len(waiting) == len(out) and not self._gathered:
                # Nothing waited for anything.
                self.gathering, self._streak = False, 0

    async def _rest(self, until: float) -> None:
        """Lets messages gather, until a monotonic moment or `_go`."""
        left = until - monotonic()
        if left <= 0:
            return
        self._pause = self._loop.create_future()
        timer = self._loop.call_later(left, self._go)
        try:
            await self._pause
        finally:
            timer.cancel()
            self._pause = None

    def _go(self) -> None:
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._on_failure()


def merged(messages: Iterable[bytes]) -> list[bytes]:
    """The same stream in fewer messages.

    Chunks of one choice are joined, each choice's in their order; nothing is
    joined or moved across a message that is no chunk.
    """
    out: list[bytes] = []
    run: list[bytes] = []
    for message in messages:
        if message[:1] == CHUNK:
            run.append(message)
        else:
            out += _joined(run)
            run.clear()
            out.append(message)
    out += _joined(run)
    return out


def _joined(run: list[bytes]) -> Iterator[bytes]:
    if len(run) < 2:
        yield from run
        return
    parts: list[_Part] = []
    last: dict[int, _Part] = {}
    for raw in run:
        part = _Part(raw)
        before = last.get(part.index)
        if before is None or not before.join(part):
            last[part.index] = part
            parts.append(part)
    for part in parts:
        yield part.raw or part.response.SerializeToString()


class _Part:
    """A chunk, and those of the same choice that were joined to it."""

    __slots__ = ("completion_tokens", "ids", "index", "raw", "response", "strange")

    def __init__(self, raw: bytes) -> None:
        # The message as it came, as long as it is alone.
        self.raw = raw
        self.response = engine.GenerateResponse.FromString(raw)
        chunk = self.response.chunk
        self.index = chunk.index
        self.ids = len(chunk.token_ids)
        self.completion_tokens = chunk.completion_tokens
        # It is more than a chunk, or has fields that we do not know and cannot know how to join.
        self.strange = bool(
            not self.response.HasField("chunk") or _unknown(self.response) or _unknown(chunk)
        )

    def join(self, following: _Part) -> bool:
        """Appends the next chunk of the same choice, if the counts of both can be told together.

        Workers count a choice's tokens from its start, or from the last message.
        Where either could be meant, both give the same sum.
        """
        counted, new = following.completion_tokens, following.ids
        if self.strange or following.strange:
            return False
        if self.completion_tokens == self.ids and counted == new:
            total = self.completion_tokens + counted
        elif counted == self.completion_tokens + new or counted == self.completion_tokens == 0:
            total = counted
        else:
            return False
        # Messages of one type concatenate: lists grow, and of a number the last counts.
        self.response.MergeFromString(following.raw)
        self.raw = b""
        if total != counted:
            self.response.chunk.completion_tokens = total
        self.ids += new
        self.completion_tokens = total
        return True


def _unknown(message: Message) -> int:
    return len(UnknownFieldSet(message))
