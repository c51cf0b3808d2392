"""A worker's load: reserved, pushed, asked for, and not known."""

from __future__ import annotations

from math import inf, nan

import pytest

from router.fleet.load import Load, LoadSource
from router.wire import common, engine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def polled(**values: float) -> engine.GetLoadsResponse:
    return engine.GetLoadsResponse(loads=[engine.SchedulerLoad(**values)])


def test_nothing_is_known_before_the_first_report() -> None:
    load = Load()
    assert load.reported is None
    assert not load.pushing
    assert load.silence == 0


def test_polled_ranks_are_summed_and_the_fullest_cache_counts() -> None:
    clock = Clock()
    load = Load(clock=clock)
    ranks = [
        engine.SchedulerLoad(num_running_reqs=2, num_waiting_reqs=1, token_usage=0.2),
        engine.SchedulerLoad(dp_rank=1, num_running_reqs=3, token_usage=0.9),
    ]
    load.report_scheduler(engine.GetLoadsResponse(loads=ranks))
    assert load.reported is not None
    assert (load.reported.running, load.reported.waiting) == (5, 1)
    assert load.reported.kv_usage == 0.9
    assert load.reported.at == 100.0


def test_pushed_ranks_are_merged_and_a_rank_replaces_its_own_record_only() -> None:
    load = Load(clock=Clock())
    load.report_engine(common.EngineLoad(running_requests=2), rank=0)
    load.report_engine(common.EngineLoad(running_requests=3, waiting_requests=4), rank=1)
    load.report_engine(common.EngineLoad(running_requests=5), rank=0)
    assert load.reported is not None
    assert (load.reported.running, load.reported.waiting) == (8, 4)


def test_what_one_rank_does_not_say_is_not_known_in_all() -> None:
    load = Load(clock=Clock())
    load.report_engine(common.EngineLoad(waiting_uncached_tokens=0), rank=0)
    assert load.reported is not None
    assert load.reported.waiting_uncached_tokens == 0
    load.report_engine(common.EngineLoad(), rank=1)
    assert load.reported.waiting_uncached_tokens is None


def test_a_push_is_as_old_as_it_says() -> None:
    load = Load(clock=Clock())
    load.report_engine(common.EngineLoad(age_ms=1500))
    assert load.reported is not None
    assert load.reported.at == 98.5


def test_pushes_spare_the_asking_until_they_stop() -> None:
    clock = Clock()
    load = Load(clock=clock)
    load.report_engine(common.EngineLoad(running_requests=9), rank=0)
    assert load.pushing
    clock.now += 6
    assert not load.pushing
    load.report_engine(common.EngineLoad(running_requests=1), rank=1)
    assert load.reported is not None
    assert load.reported.running == 1, "rank 0 has not been heard of since the gap"


def test_silence_is_that_of_the_worst_rank_and_grows_until_the_next_report() -> None:
    clock = Clock()
    load = Load(clock=clock)
    load.reserve(10, 10)
    load.report_engine(common.EngineLoad(engine_silence_ms=500), rank=0)
    load.report_engine(common.EngineLoad(engine_silence_ms=4000), rank=1)
    clock.now += 2
    assert load.silence == 6.0
    load.report_engine(common.EngineLoad(engine_silence_ms=0), rank=1)
    load.report_engine(common.EngineLoad(engine_silence_ms=0), rank=0)
    clock.now += 2
    assert load.silence == 0


def test_silence_without_requests_of_ours_is_no_silence() -> None:
    load = Load(clock=Clock())
    load.report_engine(common.EngineLoad(engine_silence_ms=90_000))
    assert load.silence == 0


def test_each_report_and_its_absence_are_counted_apart() -> None:
    heard: list[LoadSource] = []
    load = Load(on_report=heard.append)
    load.report_scheduler(polled(num_running_reqs=1))
    load.report_scheduler(engine.GetLoadsResponse())
    load.no_report(LoadSource.FAILED)
    load.report_engine(common.EngineLoad())
    assert heard == [
        LoadSource.POLLED,
        LoadSource.UNKNOWN,
        LoadSource.FAILED,
        LoadSource.PUSHED,
    ]


def test_a_failed_question_leaves_the_last_report_as_it_is() -> None:
    load = Load(clock=Clock())
    load.report_scheduler(polled(num_running_reqs=7))
    before = load.reported
    load.no_report(LoadSource.FAILED)
    load.report_scheduler(engine.GetLoadsResponse())
    assert load.reported is before


def test_reservations_come_back_to_nothing() -> None:
    load = Load()
    first = load.reserve(10, 10)
    second = load.reserve(5, 0)
    assert (load.in_flight, load.reserved_tokens) == (2, 15)
    load.give_back(first)
    assert (load.in_flight, load.reserved_tokens) == (1, 5)
    assert not load.idle.is_set()
    load.give_back(second)
    assert (load.in_flight, load.reserved_tokens) == (0, 0)
    assert load.idle.is_set()


# -- What a new request would wait for


def waited(load: Load) -> float:
    return load.backlog.pressure().queued


def test_tokens_of_others_count_once_two_reports_in_a_row_show_them() -> None:
    load = Load(clock=Clock())
    load.report_scheduler(polled(num_waiting_uncached_tokens=9000))
    assert waited(load) == 0
    load.report_scheduler(polled(num_waiting_uncached_tokens=7000))
    assert waited(load) == 7000


def test_what_is_pending_in_the_engine_is_the_better_word() -> None:
    load = Load(clock=Clock())
    for _ in range(2):
        load.report_engine(
            common.EngineLoad(waiting_uncached_tokens=100, prefill_pending_tokens=5000), rank=0
        )
        load.report_engine(common.EngineLoad(prefill_pending_tokens=1000), rank=1)
    assert waited(load) == 6000


def test_a_record_that_says_nothing_of_tokens_leaves_what_is_known() -> None:
    load = Load(clock=Clock())
    for _ in range(2):
        load.report_scheduler(polled(num_waiting_uncached_tokens=400))
    load.report_engine(common.EngineLoad())
    assert waited(load) == 400


@pytest.mark.parametrize("count", [-1, 2**31 - 1])
def test_what_is_no_count_is_not_known(count: int) -> None:
    load = Load(clock=Clock())
    rank = engine.SchedulerLoad(
        num_running_reqs=count, num_waiting_reqs=3, num_waiting_uncached_tokens=count
    )
    load.report_scheduler(engine.GetLoadsResponse(loads=[engine.SchedulerLoad(), rank]))
    assert load.reported is not None
    assert load.reported.running is None
    assert load.reported.waiting == 3
    assert load.reported.pending_tokens is None


@pytest.mark.parametrize("share", [nan, inf, -inf, -0.5])
def test_what_is_no_share_is_not_known(share: float) -> None:
    load = Load(clock=Clock())
    load.report_scheduler(polled(token_usage=share, num_running_reqs=2))
    assert load.reported is not None
    assert (load.reported.kv_usage, load.reported.running) == (None, 2)
    load.report_engine(common.EngineLoad(token_usage=share, running_requests=4))
    assert (load.reported.kv_usage, load.reported.running) == (None, 4)


def test_ranks_without_end_are_not_kept() -> None:
    load = Load(clock=Clock())
    for rank in range(5000):
        load.report_engine(common.EngineLoad(running_requests=1), rank=rank)
    assert load.reported is not None
    assert load.reported.running == 1024
