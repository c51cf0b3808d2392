"""Policies that look at load, turns or nothing."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.policy.base import Policy, RoutingView
from router.policy.least_load import LeastLoad, PowerOfTwo
from router.policy.random import Random
from router.policy.registry import policy_named
from router.policy.round_robin import RoundRobin
from tests.policy.fleet import FakeWorker, fleet

VIEW = RoutingView(100)


def policies() -> list[Policy]:
    rng = random.Random(3)
    return [RoundRobin(), Random(rng), PowerOfTwo(rng), LeastLoad(rng)]


def spread(policy: Policy, workers: list[FakeWorker], n: int) -> Counter[str]:
    chosen: Counter[str] = Counter()
    for _ in range(n):
        worker = workers[policy.choose(VIEW, workers)]
        policy.reserved(VIEW, worker)
        chosen[worker.address] += 1
    return chosen


@pytest.mark.parametrize("policy", policies(), ids=lambda p: p.name)
def test_one_admissible_worker_is_taken(policy: Policy) -> None:
    assert policy.choose(VIEW, fleet(1)) == 0


@pytest.mark.parametrize("policy", policies(), ids=lambda p: p.name)
def test_ties_do_not_favour_anyone(policy: Policy) -> None:
    chosen = spread(policy, fleet(3), 300)
    assert len(chosen) == 3
    assert min(chosen.values()) >= 60


def test_asking_takes_no_turn() -> None:
    policy, workers = RoundRobin(), fleet(3)
    assert {policy.choose(VIEW, workers) for _ in range(5)} == {0}


def test_turns_survive_an_excluded_worker() -> None:
    policy, workers = RoundRobin(), fleet(3)
    spread(policy, workers, 3)
    policy.reserved(VIEW, workers[1 + policy.choose(VIEW, workers[1:])])
    assert policy.choose(VIEW, workers) == 0


def test_least_load_takes_the_shortest_wait() -> None:
    workers = fleet(4)
    for worker, wait in zip(workers, (3.0, 0.5, 0.2, 9.0), strict=True):
        worker.expected_wait = wait
    assert LeastLoad(random.Random(1)).choose(VIEW, workers) == 2


def test_power_of_two_never_takes_the_longest_wait() -> None:
    workers = fleet(4)
    for i, worker in enumerate(workers):
        worker.expected_wait = float(i)
    chosen = spread(PowerOfTwo(random.Random(1)), workers, 600)
    assert chosen[workers[3].address] == 0
    # The best is in half of the pairs, the second in a third, the third in a sixth.
    assert chosen[workers[0].address] == pytest.approx(300, abs=50)
    assert chosen[workers[1].address] == pytest.approx(200, abs=50)


@pytest.mark.parametrize(
    "name",
    ["round_robin", "random", "power_of_two", "least_load", "consistent_hash", "prefix"],
)
def test_policies_go_by_their_names(name: str) -> None:
    assert policy_named(name).name == name


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="fastest"):
        policy_named("fastest")
