"""Expectations from our own decisions: they end, and they are bounded."""

from __future__ import annotations

import numpy as np
import pytest

from router.prefix.blocks import PromptBlocks
from router.prefix.changes import Cleared, Removed, Stored
from router.prefix.index import IndexSettings, PrefixIndex


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def index(expected_blocks: int = 64) -> tuple[PrefixIndex, Clock]:
    clock = Clock()
    settings = IndexSettings(blocks=64, expected_blocks=expected_blocks)
    return PrefixIndex(settings, clock=clock, seed=1), clock


def ids(n: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + 4 * n, dtype=np.uint32)


def keys(n: int, start: int = 0) -> np.ndarray:
    return PromptBlocks(ids(n, start), seed=1).keys(4)


def test_what_was_sent_is_expected_until_its_time_is_over() -> None:
    it, clock = index()
    a, b = it.join(), it.join()
    it.expect(a, keys(3), 120)
    clock.now += 119
    assert it.match(keys(3), [a, b]).blocks[:2].tolist() == [3, 0]
    clock.now += 2
    assert it.match(keys(3), [a, b]).blocks[:2].tolist() == [0, 0]


@pytest.mark.parametrize("years", [5, 7, 100, 10**6])
def test_a_time_may_be_as_long_as_anybody_writes_it(years: int) -> None:
    it, clock = index()
    a = it.join()
    it.expect(a, keys(3), years * 365 * 86400.0)
    clock.now += 86400
    assert it.match(keys(3), [a]).blocks[a] == 3


def test_use_starts_the_time_anew() -> None:
    it, clock = index()
    a = it.join()
    it.expect(a, keys(3), 120)
    clock.now += 100
    it.expect(a, keys(2), 120)
    clock.now += 100
    assert it.match(keys(3), [a]).blocks[a] == 2


def test_a_shorter_expectation_does_not_cut_a_longer_one() -> None:
    it, clock = index()
    a = it.join()
    it.expect(a, keys(1), 120)
    it.expect(a, keys(1), 10)
    clock.now += 60
    assert it.match(keys(1), [a]).blocks[a] == 1


def test_reported_and_expected_blocks_make_one_prefix() -> None:
    it, clock = index()
    a = it.join()
    it.apply(a, Stored(np.arange(2, dtype=np.int64), None, ids(2), 4))
    it.expect(a, keys(4), 30)
    assert it.match(keys(4), [a]).weights[a] == 4
    clock.now += 31
    assert it.match(keys(4), [a]).blocks[a] == 2


def test_what_the_worker_removed_is_not_expected_any_more() -> None:
    it, _ = index()
    a, b = it.join(), it.join()
    for holder in (a, b):
        it.expect(holder, keys(2), 30)
    it.apply(a, Stored(np.arange(2, dtype=np.int64), None, ids(2), 4))
    it.apply(a, Removed(np.array([1], np.int64)))
    assert it.match(keys(2), [a, b]).blocks[:2].tolist() == [1, 2]


def test_clearing_a_worker_ends_what_was_expected_of_it() -> None:
    it, _ = index()
    a, b = it.join(), it.join()
    for holder in (a, b):
        it.expect(holder, keys(2), 30)
    it.apply(a, Cleared())
    assert it.match(keys(2), [a, b]).blocks[:2].tolist() == [0, 2]


def test_expectations_are_bounded_and_the_newest_stay() -> None:
    it, _ = index(expected_blocks=16)
    a = it.join()
    for i in range(200):
        it.expect(a, keys(5, 1000 * i), 120)
        assert it.expected <= 16
    assert it.match(keys(5, 199_000), [a]).blocks[a] == 5


def test_a_prompt_longer_than_the_bound_keeps_its_beginning() -> None:
    it, _ = index(expected_blocks=16)
    a = it.join()
    it.expect(a, keys(40), 120)
    assert it.match(keys(40), [a]).blocks[a] == 16


def test_expired_expectations_make_room() -> None:
    it, clock = index()
    a = it.join()
    for i in range(6):
        it.expect(a, keys(10, 1000 * i), 20)
    clock.now += 21
    for i in range(4):
        it.expect(a, keys(1, 100_000 + 1000 * i), 20)
    assert it.expected < 60


def test_expectations_survive_the_arrival_of_many_workers() -> None:
    it, _ = index()
    a = it.join()
    it.expect(a, keys(3), 120)
    others = [it.join() for _ in range(100)]
    it.expect(others[-1], keys(2), 120)
    blocks = it.match(keys(3), [a, *others]).blocks
    assert (blocks[a], blocks[others[0]], blocks[others[-1]]) == (3, 0, 2)
