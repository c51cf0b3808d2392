"""Forwarded prompts, by what was seen and learned of their media."""

from __future__ import annotations

import pytest

from router.media.intake import Glance
from router.prefix.names import Learned, NameLimits, learned
from router.prefix.outline import read, reported
from router.request.estimate import Estimate
from router.request.referred import Item, expand
from router.vision.plan import ModelSpec
from tests.prefix.batches import run_of
from tests.vision.families import MODELS
from tests.vision.test_families import made

LIMITS = NameLimits()


def item(spec: ModelSpec, index: int, name: str, entry: Learned | None = None) -> Item:
    plan = spec.plan_image(640, 480, index=index)
    return Item(Glance(name=name), Estimate(plan, known=False), entry)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("size", [16, 128])
def test_every_familys_layout_is_learned_as_the_worker_has_it(family: str, size: int) -> None:
    spec = made(family)
    anchor = spec.anchor_ids["image"]
    prompt = [*range(50, 90), anchor, 95, 96, anchor, *range(50, 300)]
    truth = [spec.plan_image(300, 500, index=0), spec.plan_image(900, 400, index=1)]
    worker = spec.expand(prompt, truth)
    guessed = expand(spec, prompt, [item(spec, 0, "a"), item(spec, 1, "b")], prefixes=True)
    assert guessed.blocks is not None
    assert not guessed.blocks.exact
    assert guessed.references is not None
    assert guessed.references.outline.sure == worker.ranges[0][0]
    run = run_of(worker.ids, [("id-a", *worker.ranges[0]), ("id-b", *worker.ranges[1])], size)
    found = read(guessed.references.outline, reported(run, 0), len(worker.ids))
    assert found is not None
    assert [found[k].identifier for k in (0, 1)] == ["id-a", "id-b"]
    entries = [learned(found[k].identifier, found[k].tokens, LIMITS) for k in (0, 1)]
    known = expand(
        spec,
        prompt,
        [item(spec, 0, "a", entries[0]), item(spec, 1, "b", entries[1])],
        prefixes=True,
    )
    assert known.blocks is not None
    assert known.blocks.exact
    assert known.blocks.tokens.tolist() == worker.ids.tolist()
    assert [(m.identifier, m.offset, m.length) for m in known.blocks.media] == [
        ("id-a", *worker.ranges[0]),
        ("id-b", *worker.ranges[1]),
    ]
    assert [size.tokens for size in known.items] == [p.feature_tokens for p in truth]


def test_a_name_without_a_length_is_used_and_is_not_exact() -> None:
    spec = made("qwen3_vl")
    prompt = [5, spec.anchor_ids["image"], 6]
    named = expand(spec, prompt, [item(spec, 0, "a", Learned("id-a"))], prefixes=True)
    assert named.blocks is not None
    assert not named.blocks.exact
    assert named.blocks.media[0].identifier == "id-a"


def test_where_nobody_scores_prefixes_there_are_no_blocks() -> None:
    spec = made("qwen3_vl")
    plain = expand(spec, [5, spec.anchor_ids["image"], 6], [item(spec, 0, "")], prefixes=False)
    assert (plain.blocks, plain.references) == (None, None)
    assert plain.tokens > 3
