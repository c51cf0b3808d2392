"""What goes on elsewhere after a stream broke, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from router.request.migrate import Continuation, eligible
from router.wire import engine

END = 151645


def asked(**sampling: Any) -> engine.GenerateRequest:
    return engine.GenerateRequest(
        tokenized=engine.TokenizedInput(input_ids=[7, 8]),
        sampling_params=engine.SamplingParams(**sampling),
        stream=True,
    )


def chunk(*ids: int, counted: int) -> bytes:
    part = engine.GenerateStreamChunk(token_ids=ids, completion_tokens=counted, prompt_tokens=2)
    return engine.GenerateResponse(chunk=part).SerializeToString()


def broken_after(*ids: int, request: engine.GenerateRequest) -> Continuation:
    """A stream that told these ids, one a message, and then broke."""
    stream = Continuation(frozenset({END}))
    for token in ids:
        stream.keep(chunk(token, counted=1))
    stream.resume(request)
    return stream


def test_what_is_left_is_asked_for_with_what_was_told() -> None:
    request = asked(max_tokens=10, min_tokens=5)
    stream = broken_after(1, 2, 3, request=request)
    assert list(request.tokenized.input_ids) == [7, 8, 1, 2, 3]
    params = request.sampling_params
    assert (params.max_tokens, params.min_tokens) == (7, 2)
    assert stream.tokens == 3
    assert not stream.exhausted(request)


@pytest.mark.parametrize("cumulative", [False, True])
def test_counts_go_on_in_the_workers_own_manner(cumulative: bool) -> None:
    stream = Continuation()
    for told in (1, 2, 3):
        stream.keep(chunk(told, counted=told if cumulative else 1))
    stream.resume(asked())
    later = engine.GenerateStreamChunk(token_ids=[4], completion_tokens=1, prompt_tokens=5)
    message = engine.GenerateResponse(chunk=later).SerializeToString()
    part = engine.GenerateResponse.FromString(stream.translate(message)).chunk
    assert (part.completion_tokens, part.prompt_tokens) == (4 if cumulative else 1, 2)
    end = engine.GenerateComplete(output_ids=[4], completion_tokens=1, prompt_tokens=5)
    message = engine.GenerateResponse(complete=end).SerializeToString()
    complete = engine.GenerateResponse.FromString(stream.translate(message)).complete
    assert list(complete.output_ids) == ([1, 2, 3, 4] if cumulative else [4])
    assert complete.prompt_tokens == 2


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2**32 - 1])
def test_a_worker_may_count_to_any_number(number: int, cumulative: bool) -> None:
    stream = Continuation()
    for told in (1, 2, 3):
        counted = told if cumulative else 1
        part = engine.GenerateStreamChunk(token_ids=[told], completion_tokens=counted)
        stream.keep(engine.GenerateResponse(chunk=part).SerializeToString())
    stream.resume(asked())
    for kind, part_type in (
        ("chunk", engine.GenerateStreamChunk),
        ("complete", engine.GenerateComplete),
    ):
        later = part_type(completion_tokens=number, prompt_tokens=number, cached_tokens=number)
        message = engine.GenerateResponse(**{kind: later}).SerializeToString()
        part = getattr(engine.GenerateResponse.FromString(stream.translate(message)), kind)
        assert part.completion_tokens == min(number + 3 * cumulative, 2**32 - 1)
        assert part.prompt_tokens == max(0, number - 3)


@pytest.mark.parametrize(
    ("sampling", "last", "over"),
    [
        ({}, END, True),
        ({"ignore_eos": True}, END, False),
        ({"stop_token_ids": [9]}, 9, True),
        ({"stop_token_ids": [9], "ignore_eos": True}, 9, True),
        ({"min_tokens": 5}, END, False),
        ({"min_tokens": 2}, END, True),
        ({"max_tokens": 2}, 3, True),
        ({"max_tokens": 3}, 3, False),
    ],
)
def test_an_answer_that_is_over_is_not_gone_on_with(
    sampling: dict[str, Any], last: int, over: bool
) -> None:
    request = asked(**sampling)
    assert broken_after(1, last, request=request).exhausted(request) is over


def test_where_more_than_token_ids_decides_a_stream_stays_broken() -> None:
    assert eligible(asked())
    for sampling in (
        {"seed": 0},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": 5},
        {"n": 2},
        {"stop": ["x"]},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"regex": "a"},
    ):
        assert not eligible(asked(**sampling)), sampling
    assert not eligible(engine.GenerateRequest(text="x", stream=True))
    request = asked()
    request.stream = False
    assert not eligible(request)
