"""By what another engine at the same address is recognised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.fleet.identity import Identity

FIRST = Identity(
    model_path="org/model",
    model_type="qwen3_vl",
    served_name="model",
    kv_engine_id="a",
    fingerprint="f",
    uptime=100.0,
    read_at=1000.0,
)


def test_the_same_engine_later_is_the_same() -> None:
    later = replace(FIRST, uptime=130.0, read_at=1030.0)
    assert FIRST.replaced_by(later, reconnected=False) is None
    assert FIRST.replaced_by(later, reconnected=True) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"uptime": 3.0, "read_at": 1030.0},
        {"kv_engine_id": "b"},
        {"model_path": "org/other"},
        {"served_name": "other"},
        {"model_type": "llama"},
        {"fingerprint": "g"},
    ],
)
def test_another_engine_is_told_by_any_of_its_marks(changes: dict[str, object]) -> None:
    assert FIRST.replaced_by(replace(FIRST, **changes), reconnected=False)


def test_a_short_lived_engine_and_its_longer_lived_successor_are_told_apart() -> None:
    short = replace(FIRST, uptime=2.0)
    successor = replace(FIRST, uptime=20.0, read_at=1030.0)
    assert short.replaced_by(successor, reconnected=True)
    # Without a lost connection it is a clock that is not quite right.
    assert short.replaced_by(successor, reconnected=False) is None


def test_clocks_may_differ_a_little() -> None:
    later = replace(FIRST, uptime=129.0, read_at=1030.0)
    assert FIRST.replaced_by(later, reconnected=True) is None


def test_an_engine_that_tells_no_uptime_is_not_replaced_for_that() -> None:
    silent = replace(FIRST, uptime=None)
    assert silent.replaced_by(FIRST, reconnected=True) is None
    assert FIRST.replaced_by(silent, reconnected=True) is None
