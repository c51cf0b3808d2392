"""Keys stick to workers, until a worker has too much of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import xxhash

from router.policy.base import RoutingView
from router.policy.consistent_hash import ConsistentHash
from router.policy.least_load import LeastLoad
from tests.policy.fleet import FakeWorker, fleet


def policy() -> ConsistentHash:
    return ConsistentHash(1.25, LeastLoad(random.Random(1)))


def homes(workers: list[FakeWorker], keys: range) -> dict[str, str]:
    return {
        key: workers[policy().choose(RoutingView(10, key), workers)].address
        for key in map(str, keys)
    }


def test_a_key_has_one_worker_in_whatever_order_they_stand() -> None:
    workers = fleet(8)
    assert homes(workers, range(50)) == homes(workers[::-1], range(50))


def test_keys_are_spread_over_all_workers() -> None:
    assert len(set(homes(fleet(8), range(200)).values())) == 8


def test_a_worker_that_goes_moves_only_its_own_keys() -> None:
    workers = fleet(8)
    before, after = homes(workers, range(200)), homes(workers[1:], range(200))
    moved = {key for key in before if before[key] != after[key]}
    assert moved == {key for key in before if before[key] == workers[0].address}


def test_a_key_is_gone_through_once_however_many_workers_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed, digest = [], xxhash.xxh64_intdigest

    def noted(data: bytes, *arguments: Any, **named: Any) -> int:
        hashed.append(len(data))
        return digest(data, *arguments, **named)

    monkeypatch.setattr(xxhash, "xxh64_intdigest", noted)
    policy().choose(RoutingView(10, "k" * 10_000), fleet(64))
    assert sum(size >= 10_000 for size in hashed) == 1


def test_a_busy_worker_passes_its_keys_on_and_gets_them_back() -> None:
    workers = fleet(4)
    view = RoutingView(10, "user-1")
    home = workers[policy().choose(view, workers)]
    home.expected_wait = 10.0
    assert workers[policy().choose(view, workers)] is not home
    home.expected_wait = 0.3
    assert workers[policy().choose(view, workers)] is home


def test_equally_busy_workers_keep_their_keys() -> None:
    workers = fleet(4)
    before = homes(workers, range(20))
    for worker in workers:
        worker.expected_wait = 30.0
    assert homes(workers, range(20)) == before


def test_without_a_key_the_load_decides() -> None:
    workers = fleet(3)
    workers[0].expected_wait = workers[2].expected_wait = 1.0
    assert policy().choose(RoutingView(10), workers) == 1
