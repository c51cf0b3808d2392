"""Counting tokens with what a worker hands out as its tokenizer."""

from __future__ import annotations

import io
import json

import pytest

from router.fleet.tokens import TokenCounter, UnreadableTokenizer
from workers.sim import SimOptions
from workers.sim.bundle import model_files


def test_a_text_that_cannot_fit_is_not_tokenised() -> None:
    counter = TokenCounter(model_files(SimOptions())["tokenizer.json"])
    ids = counter.ids("word word", enough=100)
    assert ids is not None and len(ids) == counter.count("word word", enough=100)
    assert counter.ids("word " * 10_000, enough=10) is None
    assert counter.count("word " * 10_000, enough=10) > 10


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"version": "9"}'])
def test_a_tokenizer_of_another_form_is_told_once_and_counts_nothing(
    content: bytes, logged: io.StringIO
) -> None:
    counter = TokenCounter(content)
    for ask in (counter.ids, counter.count, counter.ids):
        with pytest.raises(UnreadableTokenizer):
            ask("word", enough=100)
    events = [json.loads(line)["event"] for line in logged.getvalue().splitlines()]
    assert events == ["tokenizer_unreadable"]
