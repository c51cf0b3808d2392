"""What lies at a worker, and how fast it goes, from what can be observed."""

from __future__ import annotations

import pytest

from router.fleet.pressure import OVERHEAD_TOKENS, Backlog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def serve(backlog: Backlog, clock: Clock, tokens: int, seconds: float) -> None:
    """One request alone, from sending to its end."""
    place = backlog.reserve(tokens, tokens)
    clock.now += seconds
    place.first_output()
    place.finish()


def test_a_request_counts_until_its_first_output(clock: Clock) -> None:
    backlog = Backlog(clock)
    place = backlog.reserve(1000, 4000)
    assert backlog.pressure().queued == 1000 + OVERHEAD_TOKENS
    place.first_output()
    after = backlog.pressure()
    assert (after.queued, after.in_flight, after.context_tokens) == (0, 1, 4000)
    place.finish()
    assert (backlog.in_flight, backlog.context_tokens) == (0, 0)


def test_a_request_that_fails_unanswered_leaves_nothing(clock: Clock) -> None:
    backlog = Backlog(clock)
    backlog.reserve(1000, 4000).finish()
    after = backlog.pressure()
    assert (after.queued, after.in_flight, after.context_tokens) == (0, 0, 0)


def test_a_place_is_given_up_once(clock: Clock) -> None:
    backlog = Backlog(clock)
    place = backlog.reserve(1000, 4000)
    for _ in range(2):
        place.finish()
    place.first_output()
    after = backlog.pressure()
    assert (after.queued, after.in_flight, after.context_tokens) == (0, 0, 0)


def test_the_oldest_prompt_melts_while_it_is_worked_on(clock: Clock) -> None:
    backlog = Backlog(clock)
    serve(backlog, clock, 2000 - OVERHEAD_TOKENS, 1.0)
    backlog.reserve(6000 - OVERHEAD_TOKENS, 0)
    backlog.reserve(1000 - OVERHEAD_TOKENS, 0)
    clock.now += 2
    assert backlog.pressure().queued == pytest.approx(3000)
    clock.now += 60
    assert backlog.pressure().queued == pytest.approx(1000)


def test_the_rate_is_of_work_and_not_of_idleness(clock: Clock) -> None:
    backlog = Backlog(clock)
    for _ in range(5):
        serve(backlog, clock, 2000 - OVERHEAD_TOKENS, 1.0)
        clock.now += 50
    assert backlog.rate == pytest.approx(2000)


def test_the_rate_of_a_queue_counts_its_time_once(clock: Clock) -> None:
    backlog = Backlog(clock)
    for place in [backlog.reserve(2000 - OVERHEAD_TOKENS, 0) for _ in range(3)]:
        clock.now += 1.0
        place.first_output()
    assert backlog.rate == pytest.approx(2000, rel=0.05)


def test_the_rate_follows_a_worker_that_slows_down(clock: Clock) -> None:
    backlog = Backlog(clock)
    for _ in range(50):
        serve(backlog, clock, 2000 - OVERHEAD_TOKENS, 1.0)
    for _ in range(30):
        serve(backlog, clock, 2000 - OVERHEAD_TOKENS, 4.0)
    assert backlog.rate == pytest.approx(500, rel=0.1)


def test_nothing_is_known_from_the_first_moment(clock: Clock) -> None:
    backlog = Backlog(clock)
    serve(backlog, clock, 100, 0.1)
    assert backlog.rate is None
    assert backlog.pressure().wait(1000) == 0


def test_work_of_other_routers_counts_when_two_reports_show_it(clock: Clock) -> None:
    backlog = Backlog(clock)
    backlog.reserve(1000, 1000)
    own = backlog.pressure().queued
    backlog.reported(9000, None)
    assert backlog.pressure().queued == own
    backlog.reported(8000, None)
    assert backlog.pressure().queued == pytest.approx(8000)


def test_our_own_requests_in_a_report_do_not_count_twice(clock: Clock) -> None:
    backlog = Backlog(clock)
    backlog.reserve(1000, 1000)
    for _ in range(3):
        backlog.reported(1000, None)
    assert backlog.pressure().queued == 1000 + OVERHEAD_TOKENS


def test_reported_work_melts_at_the_measured_rate(clock: Clock) -> None:
    backlog = Backlog(clock)
    serve(backlog, clock, 2000 - OVERHEAD_TOKENS, 1.0)
    for _ in range(2):
        backlog.reported(6000, None)
    clock.now += 2
    assert backlog.pressure().queued == pytest.approx(2000)
    clock.now += 60
    assert backlog.pressure().queued == 0


def test_silence_grows_until_something_is_heard(clock: Clock) -> None:
    backlog = Backlog(clock)
    place = backlog.reserve(10, 10)
    backlog.reported(None, 3.0)
    clock.now += 2
    assert backlog.pressure().silence == 5.0
    place.first_output()
    assert backlog.pressure().silence == 0


def test_a_report_without_silence_ends_an_older_one(clock: Clock) -> None:
    backlog = Backlog(clock)
    backlog.reported(0, 4.0)
    assert backlog.pressure().silence == 4.0
    backlog.reported(0, None)
    assert backlog.pressure().silence == 0


def test_a_full_worker_has_a_wait_for_a_slot(clock: Clock) -> None:
    backlog = Backlog(clock)
    backlog.slots = 2
    # One request a second comes to its end.
    for _ in range(100):
        serve(backlog, clock, 100, 1.0)
    backlog.reserve(1, 1)
    assert backlog.pressure().slot_wait == 0
    backlog.reserve(1, 1)
    assert backlog.pressure().slot_wait == pytest.approx(1.0, rel=0.2)
    backlog.reserve(1, 1)
    assert backlog.pressure().slot_wait == pytest.approx(2.0, rel=0.2)


def test_an_answer_in_one_piece_is_no_measure_of_the_prompt() -> None:
    clock = Clock()
    backlog = Backlog(clock)
    place = backlog.reserve(1000, 4000, told=False)
    assert backlog.pressure().queued == 1000 + OVERHEAD_TOKENS
    clock.now += 30
    place.first_output()
    assert backlog.pressure().queued == 0
    place.finish()
    assert backlog.rate is None
    assert backlog.in_flight == 0


def test_one_that_ends_unanswered_leaves_nothing_whether_told_or_not() -> None:
    backlog = Backlog(Clock())
    for told in (True, False):
        backlog.reserve(1000, 4000, told=told).finish()
    assert backlog.pressure().queued == 0
