"""When a breaker opens, whom it lets through, and what it forgets."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.fleet.breaker import Breaker, BreakerSettings, BreakerState, CallResult, Permit
from tests.fleet.stand_in import Clock

OK, FAILED, NEUTRAL = CallResult.SUCCESS, CallResult.FAILURE, CallResult.NEUTRAL


def breaker_of(clock: Clock, **values: float) -> Breaker:
    return Breaker(BreakerSettings(**values), clock)  # type: ignore[arg-type]


def call(breaker: Breaker, *results: CallResult) -> None:
    for result in results:
        permit = breaker.acquire()
        assert permit is not None
        permit.finish(result)


def opened(clock: Clock, **values: float) -> Breaker:
    breaker = breaker_of(clock, **{"min_calls": 1, **values})
    call(breaker, FAILED)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_fewer_calls_than_the_minimum_never_open_it() -> None:
    breaker = breaker_of(Clock(), min_calls=5)
    call(breaker, *[FAILED] * 4)
    assert breaker.state is BreakerState.CLOSED
    call(breaker, FAILED)
    assert breaker.state is BreakerState.OPEN
    assert breaker.acquire() is None


def test_it_opens_at_the_ratio_and_not_below() -> None:
    breaker = breaker_of(Clock(), min_calls=4, failure_ratio=0.5)
    call(breaker, OK, OK, OK, FAILED, FAILED)
    assert breaker.state is BreakerState.CLOSED
    call(breaker, FAILED)
    assert breaker.state is BreakerState.OPEN


def test_failures_outside_the_window_are_forgotten() -> None:
    clock = Clock()
    breaker = breaker_of(clock, min_calls=3, window=30)
    call(breaker, FAILED, FAILED)
    clock.advance(31)
    call(breaker, FAILED, FAILED)
    assert breaker.state is BreakerState.CLOSED
    call(breaker, FAILED)
    assert breaker.state is BreakerState.OPEN


def test_neutral_results_are_no_calls() -> None:
    breaker = breaker_of(Clock(), min_calls=2)
    call(breaker, *[NEUTRAL] * 50, FAILED)
    assert breaker.state is BreakerState.CLOSED
    call(breaker, FAILED)
    assert breaker.state is BreakerState.OPEN


def test_it_stays_open_for_its_time() -> None:
    clock = Clock()
    breaker = opened(clock, open_for=10)
    clock.advance(9.9)
    assert not breaker.admits()
    clock.advance(0.1)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admits()


def test_a_probe_that_succeeds_closes_it_and_one_that_fails_opens_it_anew() -> None:
    clock = Clock()
    breaker = opened(clock, open_for=10)
    clock.advance(10)
    call(breaker, FAILED)
    assert breaker.state is BreakerState.OPEN
    clock.advance(9)
    assert breaker.acquire() is None
    clock.advance(1)
    call(breaker, OK)
    assert breaker.state is BreakerState.CLOSED


def test_a_neutral_probe_gives_its_place_back_and_decides_nothing() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.advance(10)
    for _ in range(5):
        call(breaker, NEUTRAL)
        assert breaker.state is BreakerState.HALF_OPEN


def test_a_probe_that_is_answered_has_succeeded_and_one_whose_answer_breaks_off_has_not() -> None:
    clock = Clock()
    breaker = opened(clock)
    for broke in (True, False):
        clock.advance(10)
        probe = breaker.acquire()
        assert probe is not None and not breaker.admits()
        probe.answered()
        assert breaker.state is BreakerState.CLOSED
        other = breaker.acquire()
        assert other is not None
        other.finish(NEUTRAL)
        probe.answered()
        probe.finish(FAILED if broke else OK)
        assert breaker.state is (BreakerState.OPEN if broke else BreakerState.CLOSED)


def test_an_answer_that_breaks_off_when_others_have_succeeded_is_one_failure_of_many() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.advance(10)
    probe = breaker.acquire()
    assert probe is not None
    probe.answered()
    for _ in range(9):
        call(breaker, OK)
    probe.finish(FAILED)
    assert breaker.state is BreakerState.CLOSED
    for _ in range(8):
        call(breaker, FAILED)
    # Nine of eighteen: it was counted.
    assert breaker.state is BreakerState.OPEN


def test_an_answer_of_a_probe_of_an_earlier_time_changes_nothing() -> None:
    clock = Clock()
    breaker = opened(clock, probes=2)
    clock.advance(10)
    first, second = breaker.acquire(), breaker.acquire()
    assert first is not None and second is not None
    first.answered()
    assert breaker.state is BreakerState.HALF_OPEN and not breaker.admits()
    second.finish(FAILED)
    assert breaker.state is BreakerState.OPEN
    clock.advance(10)
    call(breaker, OK)
    first.finish(FAILED)
    assert breaker.state is BreakerState.HALF_OPEN
    call(breaker, OK)
    assert breaker.state is BreakerState.CLOSED


def test_every_probe_of_a_set_must_succeed() -> None:
    clock = Clock()
    breaker = opened(clock, probes=2)
    clock.advance(10)
    first, second = breaker.acquire(), breaker.acquire()
    assert first is not None and second is not None
    assert breaker.acquire() is None
    first.finish(OK)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.acquire() is None
    second.finish(OK)
    assert breaker.state is BreakerState.CLOSED


def test_results_that_began_in_an_earlier_state_change_nothing() -> None:
    clock = Clock()
    breaker = breaker_of(clock, min_calls=1)
    late_failure, late_success = breaker.acquire(), breaker.acquire()
    assert late_failure is not None and late_success is not None
    call(breaker, FAILED)
    clock.advance(10)
    assert breaker.state is BreakerState.HALF_OPEN
    late_success.finish(OK)
    assert breaker.state is BreakerState.HALF_OPEN
    call(breaker, OK)
    assert breaker.state is BreakerState.CLOSED
    late_failure.finish(FAILED)
    assert breaker.state is BreakerState.CLOSED


def test_a_permit_counts_once() -> None:
    breaker = breaker_of(Clock(), min_calls=2)
    permit = breaker.acquire()
    assert permit is not None
    permit.finish(FAILED)
    permit.finish(FAILED)
    assert breaker.state is BreakerState.CLOSED


def test_closing_forgets_the_failures_that_opened_it() -> None:
    clock = Clock()
    breaker = breaker_of(clock, min_calls=3, open_for=1, window=1000)
    call(breaker, FAILED, FAILED, FAILED)
    clock.advance(1)
    call(breaker, OK)
    call(breaker, FAILED, FAILED)
    assert breaker.state is BreakerState.CLOSED


def test_every_change_is_heard_once() -> None:
    clock, heard = Clock(), list[BreakerState]()
    breaker = Breaker(BreakerSettings(min_calls=1), clock, heard.append)
    call(breaker, FAILED)
    clock.advance(10)
    for _ in range(3):
        assert breaker.state is BreakerState.HALF_OPEN
    call(breaker, OK)
    assert heard == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]


class AnyInterleaving(RuleBasedStateMachine):
    """Calls begin, end and take their time in whatever order."""

    @initialize(probes=st.integers(1, 3), min_calls=st.integers(1, 4))
    def begin(self, probes: int, min_calls: int) -> None:
        self.clock = Clock()
        self.probes = probes
        self.breaker = Breaker(BreakerSettings(min_calls, 0.5, 5.0, 2.0, probes), self.clock)
        self.running: list[Permit] = []
        # Permits that were given while half-open, since it last became so.
        self.at_probe: list[Permit] = []

    def _note_state(self) -> None:
        if self.breaker.state is not BreakerState.HALF_OPEN:
            self.at_probe.clear()

    @rule()
    def start(self) -> None:
        admitted, state = self.breaker.admits(), self.breaker.state
        permit = self.breaker.acquire()
        assert (permit is not None) == admitted
        assert admitted or state is not BreakerState.CLOSED
        assert not admitted or state is not BreakerState.OPEN
        if permit is not None:
            self.running.append(permit)
            if state is BreakerState.HALF_OPEN:
                self.at_probe.append(permit)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), result=st.sampled_from(CallResult), twice=st.booleans())
    def finish(self, data: st.DataObject, result: CallResult, twice: bool) -> None:
        permit = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        permit.finish(result)
        if permit in self.at_probe:
            self.at_probe.remove(permit)
        if twice:
            permit.finish(CallResult.FAILURE)
        self._note_state()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        permit = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        permit.answered()
        if permit in self.at_probe:
            self.at_probe.remove(permit)
        self._note_state()

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self._note_state()

    @invariant()
    def no_more_probes_than_allowed(self) -> None:
        assert len(self.at_probe) <= self.probes

    @rule()
    def recovers_when_all_goes_well(self) -> None:
        """Whatever happened, it closes once its probes succeed: no place has leaked."""
        for permit in self.running:
            permit.finish(CallResult.NEUTRAL)
        self.running.clear()
        self.at_probe.clear()
        # A little more than its time, which sums of floats may miss.
        self.clock.advance(2.1)
        for _ in range(self.probes):
            permit_ = self.breaker.acquire()
            if self.breaker.state is BreakerState.CLOSED:
                if permit_ is not None:
                    permit_.finish(CallResult.SUCCESS)
                break
            assert permit_ is not None
            permit_.finish(CallResult.SUCCESS)
        assert self.breaker.state is BreakerState.CLOSED


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=60, stateful_step_count=40)
