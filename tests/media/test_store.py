"""Values kept within a cap, and made once however many ask."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.media.cache import ContentCache
from router.media.flight import SingleFlight
from router.media.store import Store


def test_the_least_recently_used_goes_first() -> None:
    store: Store[str] = Store(10)
    store.put("a", "A", 4)
    store.put("b", "B", 4)
    assert store.get("a") == "A"
    store.put("c", "C", 4)
    assert (store.get("b"), store.get("a"), store.get("c")) == (None, "A", "C")
    assert (store.nbytes, store.evictions, len(store)) == (8, 1, 2)


def test_what_is_larger_than_the_cap_is_not_kept_and_displaces_nothing() -> None:
    store: Store[str] = Store(10)
    store.put("a", "A", 4)
    store.put("b", "B", 11)
    assert (store.get("a"), store.get("b"), store.nbytes) == ("A", None, 4)


def test_a_store_of_no_bytes_keeps_nothing() -> None:
    store: Store[str] = Store(0)
    store.put("a", "A", 0)
    assert not store.enabled
    assert store.get("a") is None


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 15)), max_size=80))
def test_the_count_is_always_the_sum_and_never_over_the_cap(puts: list[tuple[str, int]]) -> None:
    store: Store[int] = Store(20)
    for key, size in puts:
        store.put(key, size, size)
        kept = [store.get(key) for key in "abcdef"]
        assert store.nbytes == sum(size for size in kept if size is not None) <= 20


async def test_those_who_ask_together_share_one_flight() -> None:
    cache = ContentCache(Store(100))
    made = 0
    go = asyncio.Event()

    async def make() -> bytes:
        nonlocal made
        made += 1
        await go.wait()
        return b"value"

    asking = [asyncio.create_task(cache.get("k", make, len)) for _ in range(5)]
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*asking) == [b"value"] * 5
    assert made == 1
    assert await cache.get("k", make, len) == b"value"
    assert (cache.counters.hits, cache.counters.misses, made) == (1, 5, 1)


async def test_a_cancelled_leader_does_not_fail_the_followers() -> None:
    cache = ContentCache(Store(100))
    go = asyncio.Event()

    async def make() -> bytes:
        await go.wait()
        return b"value"

    leader = asyncio.create_task(cache.get("k", make, len))
    await asyncio.sleep(0)
    follower = asyncio.create_task(cache.get("k", make, len))
    await asyncio.sleep(0)
    leader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leader
    go.set()
    assert await follower == b"value"


async def test_when_everybody_has_left_the_work_stops_and_the_next_starts_afresh() -> None:
    flights: SingleFlight[int] = SingleFlight()
    stopped = asyncio.Event()

    async def forever() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return 0

    async def join() -> int:
        async with flights.join("k", forever) as value:
            return value

    only = asyncio.create_task(join())
    await asyncio.sleep(0)
    only.cancel()
    with pytest.raises(asyncio.CancelledError):
        await only

    async def at_once() -> int:
        return 7

    async with flights.join("k", at_once) as value:
        assert value == 7
    await asyncio.wait_for(stopped.wait(), 5)
    assert len(flights) == 0


async def test_a_failure_reaches_everyone_and_is_not_kept() -> None:
    cache = ContentCache(Store(100))
    go = asyncio.Event()

    async def fail() -> bytes:
        await go.wait()
        raise LookupError

    async def succeed() -> bytes:
        return b"later"

    asking = [asyncio.create_task(cache.get("k", fail, len)) for _ in range(2)]
    await asyncio.sleep(0)
    go.set()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [LookupError, LookupError]
    assert await cache.get("k", succeed, len) == b"later"


async def test_a_result_is_disposed_of_once_after_the_last_has_left() -> None:
    disposed: list[int] = []
    flights: SingleFlight[int] = SingleFlight(disposed.append)
    go = asyncio.Event()

    async def make() -> int:
        await go.wait()
        return 1

    async def join() -> None:
        async with flights.join("k", make):
            assert disposed == []

    joined = [asyncio.create_task(join()) for _ in range(3)]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*joined)
    assert disposed == [1]


async def test_leaving_in_the_moment_of_completion_disposes_once() -> None:
    disposed: list[int] = []
    flights: SingleFlight[int] = SingleFlight(disposed.append)
    leaving: list[asyncio.Task[None]] = []

    async def make() -> int:
        await asyncio.sleep(0)
        leaving[0].cancel()
        return 1

    async def join() -> None:
        async with flights.join("k", make):
            raise AssertionError("was cancelled before")

    leaving.append(asyncio.create_task(join()))
    await asyncio.gather(*leaving, return_exceptions=True)
    await asyncio.sleep(0)
    assert disposed == [1]
