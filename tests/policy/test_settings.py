"""Which settings are in effect, and the gate that follows from them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from router.policy.settings import (
    PolicyOverride,
    PolicySettings,
    effective,
    uses_prefix_overlap,
)

PREFIX = PolicySettings(policy="prefix")


def test_a_requests_word_counts_before_the_models_and_that_before_the_routers() -> None:
    model = PolicyOverride(prefix_credit=0.5, prefix_temperature=0.2)
    request = PolicyOverride(prefix_credit=0.0)
    found = effective(PREFIX, model, request)
    assert (found.prefix_credit, found.prefix_temperature) == (0.0, 0.2)
    assert found.wait_weight == PREFIX.wait_weight


def test_saying_nothing_changes_nothing() -> None:
    assert effective(PREFIX, PolicyOverride(), None) == PREFIX


def test_everything_can_be_said_differently() -> None:
    names = [field.name for field in dataclasses.fields(PolicySettings)]
    assert [field.name for field in dataclasses.fields(PolicyOverride)] == names


@pytest.mark.parametrize("policy", ["round_robin", "least_load", "consistent_hash"])
def test_only_the_prefix_policy_scores_prefixes(policy: str) -> None:
    assert not uses_prefix_overlap(PolicySettings(policy=policy, prefix_credit=1.0))


def test_no_credit_no_work() -> None:
    assert uses_prefix_overlap(PREFIX)
    assert not uses_prefix_overlap(dataclasses.replace(PREFIX, prefix_credit=0.0))


def test_the_gate_asks_the_effective_settings() -> None:
    default = PolicySettings(policy="round_robin")
    assert uses_prefix_overlap(effective(default, PolicyOverride(policy="prefix")))
    assert not uses_prefix_overlap(effective(PREFIX, PolicyOverride(policy="least_load")))
    off, on = PolicyOverride(prefix_credit=0.0), PolicyOverride(prefix_credit=1.0)
    assert not uses_prefix_overlap(effective(PREFIX, None, off))
    assert uses_prefix_overlap(effective(PREFIX, off, on))


@pytest.mark.parametrize(
    "wrong", [{"prefix_temperature": -1.0}, {"prefix_credit": -0.1}, {"hash_load_factor": 0.9}]
)
def test_weights_without_a_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PolicySettings(**wrong)  # type: ignore[arg-type]


def test_the_documentation_names_each_setting_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs/routing.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", page, re.M))
    assert {name: float(value) for name, value in rows.items()} == {
        field.name: field.default
        for field in dataclasses.fields(PolicySettings)
        if field.name != "policy"
    }
