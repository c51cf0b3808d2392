"""Chunks that wait are joined: nothing is lost, moved or miscounted, and nothing waits for it."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.failure import Media
from router.request.merge import Outlet, merged
from router.request.relay import AttemptFailed, ClientGone, Progress, Write, stream
from router.wire import engine
from tests.request.test_failure import ended
from tests.request.test_relay import FOREVER, PATIENT, Call, Step, chunk, complete
from tests.serving import eventually


@dataclass
class Choice:
    """What a client makes of one choice's messages, whichever way its worker counts."""

    ids: list[int] = field(default_factory=list)
    deltas: int = 0
    # Of a worker that counts from the start.
    last: int = field(default=0, compare=False)
    logprobs: list[float] = field(default_factory=list)
    ends: int = 0


def heard(messages: Iterable[bytes]) -> dict[int, Choice]:
    choices: dict[int, Choice] = defaultdict(Choice)
    for message in messages:
        response = engine.GenerateResponse.FromString(message)
        if response.HasField("complete"):
            choices[response.complete.index].ends += 1
            continue
        part = response.chunk
        choice = choices[part.index]
        assert not choice.ends, "a chunk after its choice's end"
        choice.ids += part.token_ids
        choice.deltas += part.completion_tokens
        choice.last = part.completion_tokens or choice.last
        choice.logprobs += part.output_logprobs.token_logprobs
    return dict(choices)


def spoken(script: Sequence[tuple[int, int]], style: str, *, logprobs: bool) -> list[bytes]:
    """A worker's messages: (choice, number of new ids; -1 for its end)."""
    totals: dict[int, int] = defaultdict(int)
    done: set[int] = set()
    messages = []
    for index, new in script:
        if index in done:
            continue
        if new < 0:
            done.add(index)
            messages.append(complete(index))
            continue
        ids = list(range(totals[index], totals[index] + new))
        totals[index] += new
        count = {"delta": new, "total": totals[index], "none": 0}[style]
        part = engine.GenerateStreamChunk(index=index, token_ids=ids, completion_tokens=count)
        if logprobs:
            part.output_logprobs.token_logprobs.extend(-i / 4 for i in ids)
            part.output_logprobs.token_ids.extend(ids)
        messages.append(engine.GenerateResponse(chunk=part).SerializeToString())
    return messages


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3)), max_size=40),
    st.sampled_from(["delta", "total", "none"]),
    st.booleans(),
    st.lists(st.integers(0, 40), max_size=3),
)
def test_every_choice_is_heard_as_it_was_spoken(
    script: list[tuple[int, int]], style: str, logprobs: bool, cuts: list[int]
) -> None:
    messages = spoken(script, style, logprobs=logprobs)
    said = heard(messages)
    # Wherever the gathering begins and ends.
    edges = [0, *sorted(cuts), len(messages)]
    out = [m for a, b in itertools.pairwise(edges) for m in merged(messages[a:b])]
    got = heard(out)
    assert len(out) <= len(messages)
    assert {i: c.ids for i, c in got.items()} == {i: c.ids for i, c in said.items()}
    assert {i: c.logprobs for i, c in got.items()} == {i: c.logprobs for i, c in said.items()}
    assert {i: c.ends for i, c in got.items()} == {i: c.ends for i, c in said.items()}
    if style == "delta":
        assert {i: c.deltas for i, c in got.items()} == {i: c.deltas for i, c in said.items()}
    else:
        assert {i: c.last for i, c in got.items()} == {i: c.last for i, c in said.items()}


def test_one_message_a_choice_comes_of_a_run_of_chunks() -> None:
    messages = spoken([(0, 1), (1, 1), (0, 2), (1, 1), (0, 1)], "delta", logprobs=False)
    first, second = (engine.GenerateResponse.FromString(m).chunk for m in merged(messages))
    assert (first.index, list(first.token_ids), first.completion_tokens) == (0, [0, 1, 2, 3], 4)
    assert (second.index, list(second.token_ids), second.completion_tokens) == (1, [0, 1], 2)


def test_what_only_the_first_chunk_says_is_said_once() -> None:
    first = engine.GenerateStreamChunk(
        token_ids=[1], completion_tokens=1, prompt_tokens=9, cached_tokens=4
    )
    first.input_logprobs.token_ids.extend([5, 6])
    second = engine.GenerateStreamChunk(token_ids=[2], completion_tokens=1)
    raw = [engine.GenerateResponse(chunk=c).SerializeToString() for c in (first, second)]
    (one,) = (engine.GenerateResponse.FromString(m).chunk for m in merged(raw))
    assert (one.prompt_tokens, one.cached_tokens, one.completion_tokens) == (9, 4, 2)
    assert list(one.input_logprobs.token_ids) == [5, 6]


def test_what_is_not_understood_stays_apart_and_as_it_came() -> None:
    odd_count = spoken([(0, 2)], "delta", logprobs=False)[0]
    other = engine.GenerateStreamChunk(token_ids=[7], completion_tokens=40)
    unknown = chunk(3) + b"\xba\x3e\x01x"
    both = chunk(4) + complete()
    messages = [
        odd_count,
        engine.GenerateResponse(chunk=other).SerializeToString(),
        unknown,
        chunk(5),
        both,
        chunk(6, index=1),
    ]
    assert merged(messages) == messages


# -- A stream whose messages wait


class Reader:
    """A client that takes some time over each message."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.messages: list[bytes] = []
        self.seconds = seconds
        self.writing = 0

    async def write(self, message: bytes) -> None:
        assert not self.writing, "two writes at once"
        self.writing += 1
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.writing -= 1
        self.messages.append(message)


async def relayed(
    call: Call,
    reader: Reader | None = None,
    *,
    write: Write | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Progress:
    """Relays to a reader, or to whatever else writes."""
    progress = progress or Progress()
    await stream(
        call,  # type: ignore[arg-type]
        write or (reader or Reader()).write,
        limits=PATIENT,
        progress=progress,
        media=Media.NONE,
        on_first=lambda: None,
        **{"choices": 1, "merge": True, **options},
    )
    return progress


def many(count: int) -> list[bytes]:
    return spoken([(0, 1)] * count, "delta", logprobs=False)


async def test_a_slow_reader_gets_everything_in_fewer_messages() -> None:
    messages = [*many(300), complete()]
    reader = Reader(0.002)
    progress = await relayed(Call(*messages), reader)
    assert heard(reader.messages) == heard(messages)
    assert len(reader.messages) < 100
    assert progress.messages == 301
    assert progress.messages - progress.joined == len(reader.messages)
    assert progress.output_tokens == 300
    assert not progress.writing


async def test_it_can_be_left_off() -> None:
    messages = [*many(50), complete()]
    reader = Reader(0.001)
    progress = await relayed(Call(*messages), reader, merge=False)
    assert (reader.messages, progress.joined) == (messages, 0)


async def test_messages_that_do_not_wait_pass_one_by_one() -> None:
    paced: list[Step] = []
    for message in many(30):
        paced += [0.005, message]
    reader = Reader()
    progress = await relayed(Call(*paced, complete()), reader)
    assert (len(reader.messages), progress.joined) == (31, 0)


async def test_gathering_ends_when_nothing_waits_any_more() -> None:
    paced: list[Step] = []
    for message in many(20):
        paced += [0.1, message]
    reader = Reader(0.001)
    progress = Progress()
    relaying = asyncio.create_task(
        relayed(Call(*many(100), *paced, complete()), reader, progress=progress)
    )
    await eventually(lambda: progress.messages >= 105)
    joined = progress.joined
    assert joined
    await relaying
    assert progress.joined == joined


async def test_what_came_before_a_failure_goes_to_the_client_first() -> None:
    messages = many(200)
    reader = Reader(0.002)
    with pytest.raises(AttemptFailed):
        await relayed(Call(*messages, ended(grpc.StatusCode.UNAVAILABLE)), reader)
    assert heard(reader.messages) == heard(messages)


async def test_each_message_is_seen_on_its_way_and_in_order() -> None:
    messages = [*many(100), complete()]
    seen: list[bytes] = []

    def through(message: bytes) -> bytes:
        seen.append(message)
        return message

    await relayed(Call(*messages), Reader(0.001), through=through)
    assert seen == messages


async def test_a_client_that_leaves_while_messages_gather_cancels_the_worker() -> None:
    reader, progress = Reader(0.001), Progress()
    call = Call(*many(100), FOREVER)
    relaying = asyncio.create_task(relayed(call, reader, progress=progress))
    await eventually(lambda: progress.messages >= 40)
    relaying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await relaying
    assert call.cancels
    assert not reader.writing, "nothing is left behind"
    written = len(reader.messages)
    await asyncio.sleep(0.05)
    assert len(reader.messages) == written


async def test_a_write_that_fails_while_messages_gather_ends_the_stream() -> None:
    reader, progress = Reader(0.001), Progress()

    async def write(message: bytes) -> None:
        if progress.joined:
            raise grpc.aio.InternalError
        await reader.write(message)

    call = Call(*many(100), FOREVER, *many(100), FOREVER)
    with pytest.raises(ClientGone):
        await relayed(call, write=write, progress=progress)
    assert call.cancels


async def test_a_worker_is_not_read_without_end_for_a_client_that_does_not_read() -> None:
    progress, stuck, held = Progress(), asyncio.Event(), asyncio.Event()

    async def write(_: bytes) -> None:
        if progress.messages > 30:
            stuck.set()
            await held.wait()
        else:
            await asyncio.sleep(0.001)

    call = Call(*many(1000), complete())
    relaying = asyncio.create_task(relayed(call, write=write, progress=progress))
    await stuck.wait()
    # Turns enough to read all there is.
    for _ in range(3000):
        await asyncio.sleep(0)
    assert progress.messages < 250
    assert progress.writing, "silence is not the worker's"
    held.set()
    await relaying
    assert progress.messages == 1001


async def test_nothing_is_written_behind_what_could_not_be() -> None:
    written: list[bytes] = []

    async def failing(message: bytes) -> None:
        written.append(message)
        raise OSError("nobody is there")

    outlet = Outlet(failing, Progress(), choices=1, on_failure=lambda: None)
    outlet.gathering = True
    await outlet.put(complete(0))  # an end, which is not kept waiting
    await eventually(lambda: outlet._task is not None and outlet._task.done())
    with pytest.raises(OSError, match="nobody"):
        await outlet.put(complete(1))
    assert written == [complete(0)]
