"""Prompts without media, as they are prepared."""

from __future__ import annotations

from typing import Any, cast

import pytest

from router.fleet.bundle import TokenizerBundle
from router.fleet.model import Model
from router.fleet.tokens import TokenCounter
from router.request.interest import Interest
from router.request.prepare import Preparer
from router.request.prepared import Prepared
from router.wire import engine
from workers.sim import SimOptions
from workers.sim.bundle import model_files

TOKENIZER = model_files(SimOptions())["tokenizer.json"]
LONG = "word " * 400


async def prepared(
    text: str, *, tokenizer: bytes = TOKENIZER, prefixes: bool = False, **sampling: Any
) -> Prepared:
    """A text for a model whose workers have a context of 100 tokens."""
    model = Model(TokenizerBundle({}, b"", ""), "", None, counter=TokenCounter(tokenizer))
    request = engine.GenerateRequest(text=text, sampling_params=engine.SamplingParams(**sampling))
    preparer = Preparer(cast(Any, None), cast(Any, None))
    return await preparer.text(request, model, 100, Interest(prefixes=prefixes))


@pytest.mark.parametrize("prefixes", [False, True])
async def test_a_text_that_may_not_fit_is_counted(prefixes: bool) -> None:
    long = await prepared(LONG, prefixes=prefixes)
    assert not long.estimated and long.prompt_tokens > 100


@pytest.mark.parametrize("prefixes", [False, True])
async def test_how_long_a_text_is_that_its_worker_cuts_is_not_known(prefixes: bool) -> None:
    cut = await prepared(LONG, prefixes=prefixes, truncate_prompt_tokens=20)
    assert cut.estimated and cut.blocks is None


@pytest.mark.parametrize("prefixes", [False, True])
async def test_a_text_that_cannot_be_counted_goes_on_uncounted(prefixes: bool) -> None:
    guessed = await prepared(LONG, tokenizer=b"{}", prefixes=prefixes)
    assert guessed.estimated and guessed.blocks is None
    assert guessed.prompt_tokens == len(LONG) // 4
