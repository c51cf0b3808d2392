"""The cost of sending a prompt somewhere, in seconds."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from router.prefix.cost import Weights, lowest, seconds

PLAIN = Weights(credit=1.0, prefill=1.0, wait=1.0, crowd=0.0, spill_wait=math.inf)


def cost(weights: Weights = PLAIN, **given: list[float]) -> list[float]:
    columns = {
        "matched_tokens": [0.0, 600.0],
        "waits": [0.0, 0.5],
        "rates": [1000.0, 1000.0],
        "context_tokens": [0.0, 0.0],
        **given,
    }
    arrays = {name: np.array(column) for name, column in columns.items()}
    return seconds(1000, weights=weights, **arrays).tolist()  # type: ignore[arg-type]


def test_waiting_and_what_is_not_cached() -> None:
    assert cost() == pytest.approx([1.0, 0.9])


def test_a_worker_at_half_the_rate_takes_twice_as_long() -> None:
    assert cost(rates=[1000.0, 500.0]) == pytest.approx([1.0, 1.3])


def test_each_weight_weighs_its_term() -> None:
    weights = Weights(credit=0.5, prefill=2.0, wait=3.0, crowd=0.1, spill_wait=math.inf)
    assert cost(weights, context_tokens=[2000.0, 0.0]) == pytest.approx([2.2, 1.4 + 1.5])


def test_a_cached_prompt_costs_no_less_than_nothing() -> None:
    assert cost(matched_tokens=[0.0, 5000.0]) == pytest.approx([1.0, 0.5])


def test_far_behind_the_least_busy_one_nothing_counts_as_cached() -> None:
    near = Weights(credit=1.0, prefill=1.0, wait=1.0, crowd=0.0, spill_wait=0.4)
    assert cost(near) == pytest.approx([1.0, 1.5])


def test_equals_are_drawn_evenly() -> None:
    rng = random.Random(1)
    drawn = Counter(lowest(np.array([2.0, 1.0, 1.0, 1.0]), 0.0, rng) for _ in range(300))
    assert set(drawn) == {1, 2, 3}
    assert min(drawn.values()) >= 75


def test_the_infinite_are_never_drawn() -> None:
    rng = random.Random(1)
    costs = np.array([math.inf, 1.0, 1.2])
    assert {lowest(costs, 1.0, rng) for _ in range(100)} <= {1, 2}
