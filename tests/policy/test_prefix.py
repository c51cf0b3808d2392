"""The prefix policy weighs what is cached against what is waiting."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from router.fleet.pressure import Pressure
from router.policy.base import RoutingView
from router.policy.prefix import Prefix
from router.policy.settings import PolicySettings
from router.prefix.blocks import PromptBlocks
from tests.policy.fleet import SIZE, Counted, FakeWorker, fleet, prompt

RATE = 1000.0


def policy(**weights: float) -> Prefix:
    return Prefix(
        replace(PolicySettings(policy="prefix"), **weights),  # type: ignore[arg-type]
        lambda w: w.resident,  # type: ignore[attr-defined]
        lambda w: w.pressure,  # type: ignore[attr-defined]
        random.Random(2),
    )


def warm(worker: FakeWorker, view: RoutingView) -> None:
    """The worker holds the prompt's blocks."""
    assert worker.resident is not None and view.blocks is not None
    worker.resident.expect(view.blocks.keys(SIZE), 1000)


def busy(seconds: float, rate: float = RATE) -> Pressure:
    return Pressure(queued=seconds * rate, rate=rate)


def test_the_warm_worker_is_taken() -> None:
    workers = fleet(4)
    warm(workers[2], prompt(20))
    assert {policy().choose(prompt(30), workers) for _ in range(20)} == {2}


def test_the_longer_prefix_is_taken() -> None:
    workers = fleet(2)
    warm(workers[0], prompt(10))
    warm(workers[1], prompt(20))
    assert policy().choose(prompt(30), workers) == 1


def test_a_queue_longer_than_the_saving_is_not_worth_it() -> None:
    workers = fleet(2)
    warm(workers[0], prompt(100))
    # 1600 cached tokens at 1000 a second save 1.6 s, counted 1.5 times.
    workers[0].pressure, workers[1].pressure = busy(2.3), busy(0)
    assert policy(crowd_weight=0.0).choose(prompt(100), workers) == 0
    workers[0].pressure = busy(2.5)
    assert policy(crowd_weight=0.0).choose(prompt(100), workers) == 1


def test_waiting_is_limited_however_much_is_cached() -> None:
    workers = fleet(2)
    warm(workers[0], prompt(900))
    workers[0].pressure, workers[1].pressure = busy(5.5), busy(0)
    assert policy(spill_wait=6.0).choose(prompt(900), workers) == 0
    assert policy(spill_wait=5.0).choose(prompt(900), workers) == 1


def test_a_slow_worker_gets_less() -> None:
    workers = fleet(2)
    workers[0].pressure = Pressure(queued=1000, rate=500)
    workers[1].pressure = Pressure(queued=1500, rate=2000)
    assert policy().choose(prompt(10), workers) == 1


def test_an_unmeasured_worker_is_taken_to_be_like_the_others() -> None:
    workers = fleet(3)
    for worker in workers[:2]:
        worker.pressure = Pressure(queued=100, rate=20)
    workers[2].pressure = Pressure(queued=90)
    costs = policy().costs(prompt(1), workers)
    assert costs[2] < costs[0]
    assert costs[2] > costs[0] / 2


def test_a_silent_worker_is_left_out_unless_all_are_silent() -> None:
    workers = fleet(2)
    warm(workers[0], prompt(50))
    workers[0].pressure = Pressure(silence=6.0)
    assert policy().choose(prompt(50), workers) == 1
    workers[1].pressure = Pressure(silence=6.0)
    assert policy().choose(prompt(50), workers) == 0


def test_a_full_worker_is_passed_over() -> None:
    workers = fleet(2)
    workers[0].pressure = Pressure(slots=4, in_flight=4, slot_wait=3.0)
    assert policy().choose(prompt(5), workers) == 1


def test_three_idle_workers_share_what_nobody_has() -> None:
    workers, choosing = fleet(3), policy()
    chosen = Counter(choosing.choose(prompt(5, 100_000 * i), workers) for i in range(300))
    assert min(chosen.values()) >= 60


def test_siblings_of_a_burst_go_together_before_any_event() -> None:
    workers = fleet(8)
    choosing = policy()
    chosen = set()
    for _ in range(5):
        position = choosing.choose(prompt(40), workers)
        choosing.reserved(prompt(40), workers[position])
        chosen.add(position)
    assert len(chosen) == 1


def test_choosing_changes_nothing() -> None:
    workers = fleet(4)
    choosing = policy()
    for _ in range(50):
        choosing.choose(prompt(5), workers)
    assert all(
        c == pytest.approx(choosing.costs(prompt(5), workers)[0])
        for c in choosing.costs(prompt(5), workers)
    )


def test_workers_with_other_block_sizes_are_asked_in_their_own() -> None:
    workers = fleet(2)
    resident = workers[1].resident
    assert resident is not None
    resident.block_size = 64
    choosing = policy()
    choosing.reserved(prompt(16), workers[1])
    assert choosing.choose(prompt(16), workers) == 1
    assert choosing.charge(prompt(16), workers[1]) == 1
    assert choosing.charge(prompt(16), workers[0]) == 16 * SIZE + 1


def test_a_worker_that_just_left_has_nothing_and_takes_no_place() -> None:
    workers = fleet(2)
    warm(workers[0], prompt(20))
    resident = workers[0].resident
    assert resident is not None
    resident.leave()
    choosing = policy()
    assert choosing.costs(prompt(20), workers).tolist() == [pytest.approx(0.0963)] * 2
    choosing.reserved(prompt(20), workers[0])
    assert resident.holders == []


def test_no_credit_looks_at_no_block() -> None:
    workers = fleet(3)
    view = prompt(20)
    blocks = Counted(view)
    for weights, credit in (({"prefix_credit": 0.0}, None), ({}, 0.0)):
        asking = replace(view, blocks=blocks, prefix_credit=credit)
        choosing = policy(**weights)
        worker = workers[choosing.choose(asking, workers)]
        choosing.reserved(asking, worker)
        assert choosing.charge(asking, worker) == view.prompt_tokens
    assert blocks.asked == 0


def test_a_requests_own_credit_counts() -> None:
    workers = fleet(2)
    warm(workers[0], prompt(50))
    workers[0].pressure = busy(0.2)
    workers[1].pressure = busy(0.0)
    assert policy().choose(prompt(50), workers) == 0
    assert policy().choose(replace(prompt(50), prefix_credit=0.1), workers) == 1


def test_one_worker_needs_no_look() -> None:
    blocks = Counted(prompt(5))
    assert policy().choose(replace(prompt(5), blocks=blocks), fleet(1)) == 0
    assert blocks.asked == 0


def test_temperature_spreads_but_prefers() -> None:
    workers = fleet(2)
    warm(workers[0], prompt(50))
    choosing = policy(prefix_temperature=0.5)
    chosen = Counter(choosing.choose(prompt(50), workers) for _ in range(400))
    # exp(-1 / 0.5) is 0.135: about one in eight goes to the other.
    assert chosen[1] == pytest.approx(400 * 0.135 / 1.135, abs=25)


def test_expectations_last_longer_where_nothing_is_reported() -> None:
    workers = fleet(2)
    resident = workers[0].resident
    assert resident is not None
    seen: list[float] = []
    resident.expect = lambda keys, ttl: seen.append(ttl)  # type: ignore[method-assign]
    policy().reserved(prompt(5), workers[0])
    resident.reporting = True
    policy().reserved(prompt(5), workers[0])
    # No report will ever name a URL's picture by our name for it.
    by_url = PromptBlocks(np.arange(80, dtype=np.uint32), exact=False)
    policy().reserved(RoutingView(80, blocks=by_url), workers[0])
    assert seen == [120.0, 30.0, 120.0]
