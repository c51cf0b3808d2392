"""A lease reserves load and a permit together, and gives both back once."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from router.fleet.breaker import BreakerSettings, BreakerState, CallResult
from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.fleet.worker import Lease, WorkerState
from router.observe.metrics import Metrics
from tests.fleet.stand_in import Clock, worker


def test_a_lease_is_load_from_its_beginning_to_its_only_end() -> None:
    leased = worker()
    lease = leased.lease(70)
    assert lease is not None
    assert (leased.load.in_flight, leased.load.reserved_tokens) == (1, 70)
    assert not leased.load.idle.is_set()
    for _ in range(3):
        lease.release(CallResult.SUCCESS)
    assert (leased.load.in_flight, leased.load.reserved_tokens) == (0, 0)
    assert leased.load.idle.is_set()


def test_a_refused_lease_reserves_nothing() -> None:
    leased = worker(breaker=BreakerSettings(min_calls=1))
    first = leased.lease(1)
    assert first is not None
    first.release(CallResult.FAILURE)
    assert leased.breaker.state is BreakerState.OPEN
    assert leased.lease(10) is None
    assert (leased.load.in_flight, leased.load.reserved_tokens) == (0, 0)


def test_only_a_success_is_a_word_from_the_worker() -> None:
    clock = Clock()
    leased = worker(clock=clock)
    for result, heard_at in (
        (CallResult.FAILURE, 1000.0),
        (CallResult.NEUTRAL, 1000.0),
        (CallResult.SUCCESS, 1003.0),
    ):
        clock.advance(1)
        lease = leased.lease(1)
        assert lease is not None
        lease.release(result)
        assert leased.heard_at == heard_at


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 9000), st.sampled_from(CallResult)),
        max_size=60,
    )
)
def test_load_is_the_sum_of_the_leases_that_are_open(
    steps: list[tuple[int, int, CallResult]],
) -> None:
    leased, open_leases = worker(clock=Clock()), list[Lease]()
    for action, tokens, result in steps:
        if action < 3:
            lease = leased.lease(tokens)
            if lease is not None:
                open_leases.append(lease)
        elif open_leases:
            done = open_leases.pop(tokens % len(open_leases))
            done.release(result)
            done.release(CallResult.FAILURE)
        assert leased.load.in_flight == len(open_leases) >= 0
        assert leased.load.reserved_tokens == sum(lease.tokens for lease in open_leases) >= 0
        assert leased.load.idle.is_set() == (not open_leases)


async def test_a_late_release_does_not_touch_the_worker_that_came_after() -> None:
    metrics = Metrics()
    registry = Registry(metrics)
    old = registry.add(Endpoint("127.0.0.1:9"))
    lease = old.lease(100)
    assert lease is not None
    registry.remove(old, "gone")
    new = registry.add(Endpoint("127.0.0.1:9"))
    assert new.generation > old.generation

    def shown() -> float | None:
        labels = {"worker": "127.0.0.1:9"}
        return metrics.registry.get_sample_value("router_worker_in_flight", labels)

    assert (new.load.in_flight, shown()) == (0, 0)
    lease.release(CallResult.FAILURE)
    assert (old.load.in_flight, new.load.in_flight, shown()) == (0, 0, 0)
    assert new.breaker._failures == 0
    for gone in (old, new):
        await gone.channel.close()


async def test_a_removed_worker_leaves_no_series_whatever_it_still_does() -> None:
    metrics = Metrics()
    registry = Registry(metrics, breaker_settings=BreakerSettings(min_calls=1))
    removed = registry.add(Endpoint("127.0.0.1:9"))
    lease = removed.lease(1)
    assert lease is not None
    registry.remove(removed, "gone")
    lease.release(CallResult.FAILURE)
    assert removed.breaker.state is BreakerState.OPEN
    named = [
        sample
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.labels.get("worker") == "127.0.0.1:9"
    ]
    assert named == []
    assert removed.state is WorkerState.GONE
    await removed.channel.close()


def test_a_request_waits_until_its_first_output_and_is_there_until_its_end() -> None:
    clock = Clock()
    leased = worker(clock=clock)
    lease = leased.lease(4000, 1000)
    assert lease is not None
    waiting = leased.expected_wait
    assert waiting > 1000 / 5000
    clock.advance(1)
    lease.first_output()
    assert 0 < leased.expected_wait < waiting
    assert leased.load.reserved_tokens == 4000
    lease.release(CallResult.SUCCESS)
    assert leased.expected_wait == 0


def test_a_slow_worker_is_known_by_what_it_did() -> None:
    waits = []
    for seconds in (1.0, 4.0):
        clock = Clock()
        measured = worker(clock=clock)
        for _ in range(3):
            lease = measured.lease(2000)
            assert lease is not None
            clock.advance(seconds)
            lease.first_output()
            lease.release(CallResult.SUCCESS)
        measured.lease(2000)
        waits.append(measured.expected_wait)
    assert waits[1] > 3.5 * waits[0]


def test_a_worker_with_all_slots_taken_has_a_wait_for_one() -> None:
    full = worker(max_num_seqs=2)
    for _ in range(2):
        lease = full.lease(0, 0)
        assert lease is not None
        lease.first_output()
    assert full.pressure.slot_wait > 0
    assert full.pressure.slots == 2
