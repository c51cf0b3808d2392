"""A client that is slow to read gets the same answer in fewer messages, unless it asks not to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from router.wire import engine
from tests.serving import Serving, serving, streamed
from workers.sim import SimOptions
from workers.sim.options import Style

TOKENS = 1200


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    most: int = 0
    messages: int = 0


async def slowly(served: Serving, **options: bool) -> Answer:
    """Asks for a long answer, and reads it after a pause."""
    request = streamed("say much", max_tokens=TOKENS, ignore_eos=True, temperature=0, logprobs=4)
    request.router.SetInParent()
    for name, value in options.items():
        setattr(request.router, name, value)
    answer = Answer()
    call = served.stub.Generate(request, timeout=60)
    async for response in call:
        if not answer.messages:
            await asyncio.sleep(0.5)
        answer.messages += 1
        if response.HasField("complete"):
            assert response.complete.finish_reason == "length"
            continue
        chunk = response.chunk
        answer.ids += chunk.token_ids
        answer.logprobs += chunk.output_logprobs.token_logprobs
        answer.counted.append(chunk.completion_tokens)
        answer.most = max(answer.most, len(chunk.token_ids))
    return answer


@pytest.mark.parametrize("style", ["python", "rust"])
async def test_waiting_chunks_are_joined(style: Style) -> None:
    async with serving(SimOptions(style=style)) as served:
        apart = await slowly(served, one_chunk_a_message=True)
        joined = await slowly(served)
    assert (apart.messages, apart.most) == (TOKENS + 1, 1)
    assert joined.messages < TOKENS / 2
    assert joined.most > 1
    assert joined.ids == apart.ids
    assert joined.logprobs == apart.logprobs
    for answer in (apart, joined):
        if style == "python":
            assert sum(answer.counted) == TOKENS
        else:
            assert answer.counted == sorted(answer.counted)
            assert answer.counted[-1] == TOKENS


async def test_the_operator_can_leave_it_off() -> None:
    async with serving(SimOptions(), merge_chunks=False) as served:
        assert (await slowly(served)).messages == TOKENS + 1


async def test_workers_do_not_see_the_wish() -> None:
    async with serving(SimOptions()) as served:
        await slowly(served, one_chunk_a_message=True)
        sent = served.workers[0].stats.received[-1].request
    assert not sent.HasField("router")
    assert isinstance(sent, engine.GenerateRequest)
