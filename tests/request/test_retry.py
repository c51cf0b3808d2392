"""Whether there is another attempt, and after how long."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from router.faults import Fault, Reason
from router.fleet.breaker import CallResult
from router.request.failure import Again, Failure
from router.request.retry import Attempts, RetryBudget, RetrySettings


def failure(
    again: Again = Again.YES, pushback: float | None = None, *, counts: bool = True
) -> Failure:
    fault = Fault(Reason.WORKER_UNAVAILABLE, "gone")
    return Failure(fault, CallResult.FAILURE, again, pushback, counts_against_budget=counts)


def attempts(budget: RetryBudget | None = None, **settings: float) -> Attempts:
    rng = random.Random(1)
    chosen = RetrySettings(**settings)  # type: ignore[arg-type]
    return Attempts(chosen, budget or RetryBudget(), rng)


def test_there_are_no_more_attempts_than_allowed() -> None:
    made = attempts(max_attempts=3)
    pauses = []
    for _ in range(3):
        made.made += 1
        pauses.append(made.pause_after(failure(), time_left=60))
    assert [p is None for p in pauses] == [False, False, True]


def test_pauses_grow_with_jitter_and_are_capped() -> None:
    for seed in range(50):
        made = Attempts(RetrySettings(max_attempts=10), RetryBudget(1000), random.Random(seed))
        for number in range(9):
            made.made += 1
            pause = made.pause_after(failure(), time_left=60)
            plain = min(0.05 * 1.5**number, 2.0)
            assert pause is not None
            assert 0.8 * plain <= pause <= 1.2 * plain


def test_what_cannot_be_helped_is_not_tried_again() -> None:
    made = attempts()
    made.made = 1
    assert made.pause_after(failure(Again.NO), time_left=60) is None


def test_once_is_once_in_a_request_whatever_else_fails() -> None:
    made = attempts(max_attempts=10)
    made.made = 1
    assert made.pause_after(failure(Again.ONCE), time_left=60) is not None
    assert made.pause_after(failure(Again.YES), time_left=60) is not None
    assert made.pause_after(failure(Again.ONCE), time_left=60) is None


def test_the_workers_own_wish_is_honoured() -> None:
    made = attempts()
    made.made = 1
    assert made.pause_after(failure(pushback=1.25), time_left=60) == 1.25
    assert made.pause_after(failure(pushback=0.0), time_left=60) == 0.0
    assert made.pause_after(failure(pushback=-0.001), time_left=60) is None
    assert made.pause_after(failure(pushback=61.0), time_left=60) is None


def test_no_attempt_is_begun_that_the_deadline_forbids() -> None:
    made = attempts(jitter=0.0)
    made.made = 1
    assert made.pause_after(failure(), time_left=0.05) is None
    assert made.pause_after(failure(), time_left=0.051) is not None
    assert made.pause_after(failure(pushback=0.0), time_left=0.0) is None
    assert made.pause_after(failure(pushback=0.0), time_left=-1.0) is None


def test_the_budget_allows_retries_while_more_than_half_is_left() -> None:
    budget = RetryBudget(capacity=10)
    for _ in range(4):
        budget.failed()
    assert budget.allows
    budget.failed()
    assert not budget.allows
    for _ in range(11):
        budget.succeeded()
    assert budget.allows


def test_a_budget_of_nothing_allows_no_retry() -> None:
    made = attempts(RetryBudget(0))
    made.made = 1
    assert made.pause_after(failure(), time_left=60) is None


def test_failures_of_our_own_cost_no_budget() -> None:
    budget = RetryBudget(10)
    made = attempts(budget)
    made.made = 1
    made.pause_after(failure(counts=False), time_left=60)
    assert budget.tokens == 10
    made.pause_after(failure(Again.NO), time_left=60)
    assert budget.tokens == 9


@pytest.mark.parametrize("again", [Again.YES, Again.ONCE])
def test_a_hundred_requests_that_all_fail_are_at_most_a_hundred_and_twenty_calls(
    again: Again,
) -> None:
    budget, calls = RetryBudget(), 0
    for _ in range(100):
        made = attempts(budget)
        pause: float | None = 0.0
        while pause is not None:
            made.made += 1
            calls += 1
            pause = made.pause_after(failure(again), time_left=60)
    assert 100 < calls <= 120


@given(st.lists(st.booleans(), max_size=300))
def test_the_bucket_stays_between_empty_and_full(results: list[bool]) -> None:
    budget = RetryBudget(capacity=20, ratio=0.1)
    for succeeded in results:
        if succeeded:
            budget.succeeded()
        else:
            budget.failed()
        assert 0 <= budget.tokens <= 20
