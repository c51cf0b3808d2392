"""Who is admitted, who is chosen, and why nobody is."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from router.faults import Fault, Reason
from router.fleet.breaker import BreakerSettings, CallResult
from router.fleet.endpoint import Role
from router.fleet.load import ReportedLoad
from router.fleet.worker import Lease, Worker, WorkerState
from router.policy.base import RoutingView
from router.policy.random import Random
from router.policy.round_robin import RoundRobin
from router.request.constraint import Cause, WireConstraint, takes_pixels, wanted_pixels
from router.request.select import Absence, OverloadRule, select, survey
from router.vision.plan import PixelFormat
from tests.fleet.stand_in import Clock, worker

RAW = PixelFormat("uint8", normalized=False)
NORMAL = PixelFormat("bfloat16", normalized=True)
PLAIN = WireConstraint("m")
REFS = WireConstraint("m", requires_media_refs=True, schemes=frozenset({"http", "file"}))
RULE = OverloadRule()
VIEW = RoutingView(prompt_tokens=10)
NOW = 1000.0

ALL = ("http", "https", "data", "file")


# -- Admission


@pytest.mark.parametrize(
    ("constraint", "refusing", "admitting", "cause"),
    [
        (PLAIN, worker(known=False), worker(), Cause.METADATA_UNKNOWN),
        (PLAIN, worker(served_name="other"), worker(), Cause.OTHER_MODEL),
        (PLAIN, worker(role=Role.ENCODE), worker(), Cause.OTHER_ROLE),
        (PLAIN, worker(role=Role.PREFILL), worker(), Cause.OTHER_ROLE),
        (PLAIN, worker(kv_role="kv_consumer"), worker(kv_role="kv_both"), Cause.OTHER_ROLE),
        (REFS, worker(mm_processor=""), worker(mm_processor="smg"), Cause.NO_MEDIA_PROCESSOR),
        (
            REFS,
            worker(schemes=frozenset({"http", "https"})),
            worker(schemes=frozenset(ALL)),
            Cause.SCHEME_NOT_ACCEPTED,
        ),
        # One that names no schemes has no limit on them.
        (REFS, worker(schemes=frozenset({"data"})), worker(), Cause.SCHEME_NOT_ACCEPTED),
        (
            WireConstraint("m", model_fingerprint="a"),
            worker(fingerprint="b"),
            worker(fingerprint="a"),
            Cause.OTHER_MODEL_FILES,
        ),
        (
            WireConstraint("m", model_fingerprint="a"),
            worker(),
            worker(fingerprint="a"),
            Cause.OTHER_MODEL_FILES,
        ),
        (
            WireConstraint("m", pixel_format=RAW),
            worker(device_normalize=False),
            worker(device_normalize=True),
            Cause.PIXEL_FORMAT,
        ),
        (
            WireConstraint("m", pixel_format=NORMAL),
            worker(device_normalize=True),
            worker(device_normalize=False, encoder_dtype="bfloat16"),
            Cause.PIXEL_FORMAT,
        ),
        (
            WireConstraint("m", item_counts=(("image", 3),)),
            worker(item_limits={"image": 2}),
            worker(item_limits={"image": 3, "video": 0}),
            Cause.ITEM_LIMIT,
        ),
        (
            WireConstraint("m", item_counts=(("image", 1), ("video", 2))),
            worker(item_limits={"image": 9, "video": 1}),
            worker(item_limits={"image": 9}),
            Cause.ITEM_LIMIT,
        ),
        (
            WireConstraint("m", largest_item_tokens=101),
            worker(encoder_budget=100),
            worker(encoder_budget=101),
            Cause.ENCODER_BUDGET,
        ),
        (
            WireConstraint("m", largest_item_tokens=9),
            worker(encoder_budget=8),
            worker(),
            Cause.ENCODER_BUDGET,
        ),
        (
            WireConstraint("m", prompt_tokens=100),
            worker(context_length=100),
            worker(context_length=101),
            Cause.CONTEXT_LENGTH,
        ),
        (
            WireConstraint("m", prompt_tokens=9),
            worker(context_length=9),
            worker(),
            Cause.CONTEXT_LENGTH,
        ),
    ],
)
def test_a_worker_is_refused_for_its_cause_alone(
    constraint: WireConstraint, refusing: Worker, admitting: Worker, cause: Cause
) -> None:
    assert constraint.admits(refusing) is cause
    assert constraint.admits(admitting) is None


def test_every_cause_is_provoked_above() -> None:
    rows = test_a_worker_is_refused_for_its_cause_alone.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {row[3] for row in rows} == set(Cause)


def test_an_unknown_prompt_length_is_no_length() -> None:
    assert WireConstraint("m", prompt_tokens=0).admits(worker(context_length=1)) is None


def test_pixels_are_taken_by_their_rule_and_not_narrower_than_wanted() -> None:
    raw, plain = worker(device_normalize=True), worker(device_normalize=False)
    half = worker(device_normalize=False, encoder_dtype="float16")
    assert wanted_pixels(raw) == RAW
    assert wanted_pixels(plain) == PixelFormat("float32", normalized=True)
    assert wanted_pixels(half) == PixelFormat("float16", normalized=True)
    assert wanted_pixels(worker(known=False)) is None
    assert takes_pixels(raw, PixelFormat("float32", normalized=False))
    assert takes_pixels(half, PixelFormat("float32", normalized=True))
    assert not takes_pixels(half, PixelFormat("bfloat16", normalized=True))
    assert not takes_pixels(plain, PixelFormat("float16", normalized=True))
    assert not takes_pixels(worker(known=False), RAW)


# -- Choice

_workers = st.builds(
    worker,
    state=st.sampled_from(WorkerState),
    role=st.sampled_from(Role),
    known=st.booleans(),
    fingerprint=st.sampled_from([None, "a", "b"]),
    served_name=st.sampled_from(["m", "n"]),
    mm_processor=st.sampled_from(["", "smg"]),
    schemes=st.sets(st.sampled_from(ALL)).map(frozenset),
    device_normalize=st.booleans(),
    encoder_dtype=st.sampled_from(["", "bfloat16", "float16"]),
    item_limits=st.dictionaries(st.sampled_from(["image", "video"]), st.integers(0, 3)),
    encoder_budget=st.sampled_from([None, 10, 100]),
    context_length=st.sampled_from([None, 10, 100]),
)
_constraints = st.builds(
    WireConstraint,
    model=st.just("m"),
    requires_media_refs=st.booleans(),
    schemes=st.sets(st.sampled_from(ALL), max_size=2).map(frozenset),
    item_counts=st.lists(
        st.tuples(st.sampled_from(["image", "video"]), st.integers(0, 3)), max_size=2
    ).map(tuple),
    largest_item_tokens=st.sampled_from([0, 50]),
    prompt_tokens=st.sampled_from([0, 50]),
    pixel_format=st.sampled_from([None, RAW, NORMAL]),
    model_fingerprint=st.sampled_from([None, "a"]),
    roles=st.just(frozenset({Role.BOTH})),
)


@settings(max_examples=120)
@given(st.lists(_workers, max_size=6), _constraints, st.integers(0, 7), st.booleans(), st.data())
def test_nobody_is_chosen_whom_the_constraint_does_not_admit(
    workers: list[Worker],
    constraint: WireConstraint,
    broken: int,
    shed: bool,
    data: st.DataObject,
) -> None:
    for position, one in enumerate(workers):
        if broken >> position & 1:
            for _ in range(5):
                lease = one.lease(1)
                assert lease is not None
                lease.release(CallResult.FAILURE)
        one.load.reported = data.draw(
            st.sampled_from(
                [None, ReportedLoad(NOW, waiting=100), ReportedLoad(NOW - 60, waiting=100)]
            )
        )
    tried = frozenset(data.draw(st.sets(st.sampled_from(workers)) if workers else st.just(set())))
    rule = OverloadRule(shed=shed)
    seen = survey(workers, constraint, rule, NOW, tried=tried)
    able = [
        one
        for one in workers
        if constraint.admits(one) is None
        and one.state is WorkerState.READY
        and one.breaker.admits()
        and not rule.overloaded(one, NOW)
    ]
    before = {one: one.load.in_flight for one in workers}
    try:
        lease = select(seen, VIEW, Random(random.Random(0)), retry_after=1.0)
    except Fault:
        assert not able
        assert {one: one.load.in_flight for one in workers} == before
        return
    assert lease.worker in able
    assert lease.worker not in tried or tried >= set(able)
    assert lease.worker.load.in_flight == before[lease.worker] + 1
    assert sum(one.load.in_flight for one in workers) == sum(before.values()) + 1


def test_a_tried_worker_is_chosen_only_when_nobody_else_is_left() -> None:
    first, second = worker("a:1"), worker("b:1")
    policy = RoundRobin()

    def chosen(*tried: Worker) -> Worker:
        seen = survey([first, second], PLAIN, RULE, NOW, tried=frozenset(tried))
        return select(seen, VIEW, policy, retry_after=1.0).worker

    assert {chosen(first) for _ in range(3)} == {second}
    assert {chosen(first, second) for _ in range(4)} == {first, second}
    second.state = WorkerState.UNHEALTHY
    assert chosen(first) is first


def test_choosing_reserves_in_the_same_step() -> None:
    clock = Clock()
    one = worker(clock=clock, breaker=BreakerSettings(min_calls=1, probes=1))
    failed = one.lease(1)
    assert isinstance(failed, Lease)
    failed.release(CallResult.FAILURE)
    clock.advance(10)
    probe = select(survey([one], PLAIN, RULE, NOW), VIEW, RoundRobin(), retry_after=1.0)
    assert one.load.reserved_tokens == VIEW.prompt_tokens
    with pytest.raises(Fault) as refused:
        select(survey([one], PLAIN, RULE, NOW), VIEW, RoundRobin(), retry_after=1.0)
    assert refused.value.metadata["breaker_open"] == "1"
    probe.release(CallResult.NEUTRAL)
    select(survey([one], PLAIN, RULE, NOW), VIEW, RoundRobin(), retry_after=1.0)


# -- Overload


def test_overload_is_judged_by_what_is_known_and_recent() -> None:
    one = worker()
    rule = OverloadRule(waiting=4, kv_usage=0.9, max_age=10)

    def overloaded(**report: Any) -> bool:
        one.load.reported = ReportedLoad(at=report.pop("at", NOW), **report)
        return rule.overloaded(one, NOW)

    assert not rule.overloaded(one, NOW), "nothing is known"
    assert not overloaded()
    assert not overloaded(waiting=3)
    assert overloaded(waiting=4)
    assert overloaded(waiting=4, at=NOW - 10)
    assert not overloaded(waiting=4, at=NOW - 11)
    assert not overloaded(kv_usage=1.0), "a full cache without a queue"
    assert not overloaded(kv_usage=1.0, waiting=0)
    assert overloaded(kv_usage=0.9, waiting=1)
    assert not replace(rule, shed=False).overloaded(one, NOW)


def test_our_own_requests_count_before_the_worker_reports_them() -> None:
    one = worker(max_num_seqs=2)
    rule = OverloadRule(waiting=1)
    for _ in range(2):
        one.lease(1)
        assert not rule.overloaded(one, NOW)
    one.lease(1)
    assert rule.overloaded(one, NOW)
    assert not rule.overloaded(worker(max_num_seqs=None), NOW)


# -- Diagnosis


def busy(**capability: Any) -> Worker:
    one = worker(**capability)
    one.load.reported = ReportedLoad(NOW, waiting=1000)
    return one


def broken(**capability: Any) -> Worker:
    one = worker(breaker=BreakerSettings(min_calls=1), **capability)
    lease = one.lease(1)
    assert lease is not None
    lease.release(CallResult.FAILURE)
    return one


def ill(**capability: Any) -> Worker:
    return worker(state=WorkerState.UNHEALTHY, **capability)


def diagnosed(*workers: Worker, constraint: WireConstraint = REFS, unreadable: int = 0) -> Fault:
    return survey(workers, constraint, RULE, NOW, unreadable=unreadable).fault(retry_after=3.0)


NONE = {"mm_processor": ""}


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ((), Reason.NO_AVAILABLE_WORKER),
        ((ill(), broken()), Reason.NO_AVAILABLE_WORKER),
        ((worker(state=WorkerState.DRAINING),), Reason.NO_AVAILABLE_WORKER),
        ((worker(state=WorkerState.PENDING),), Reason.NO_AVAILABLE_WORKER),
        ((busy(), busy()), Reason.OVERLOADED),
        ((busy(), ill()), Reason.OVERLOADED),
        ((busy(), broken()), Reason.OVERLOADED),
        ((worker(**NONE), worker(**NONE)), Reason.NO_MEDIA_REF_CAPABLE_WORKER),
        # A capable worker that only has too much to do is no lack of capability.
        ((busy(), worker(**NONE)), Reason.OVERLOADED),
        ((ill(), worker(**NONE)), Reason.NO_AVAILABLE_WORKER),
        ((broken(), worker(**NONE)), Reason.NO_AVAILABLE_WORKER),
        ((ill(), busy(**NONE)), Reason.NO_AVAILABLE_WORKER),
        # Nor is it to blame where nobody could be asked anyway.
        ((busy(**NONE),), Reason.OVERLOADED),
        ((ill(**NONE),), Reason.NO_AVAILABLE_WORKER),
        ((broken(**NONE), ill(**NONE)), Reason.NO_AVAILABLE_WORKER),
        ((worker(**NONE), ill(**NONE)), Reason.NO_MEDIA_REF_CAPABLE_WORKER),
        # The nearest to admission tells what is missing.
        (
            (worker(**NONE), worker(schemes=frozenset({"http"}))),
            Reason.MEDIA_REF_SCHEME_NOT_ACCEPTED,
        ),
    ],
)
def test_what_passes_by_itself_is_named_before_what_does_not(
    workers: tuple[Worker, ...], reason: Reason
) -> None:
    for order in (workers, workers[::-1]):
        fault = diagnosed(*order)
        assert fault.reason is reason
        assert fault.metadata["registered"] == str(len(workers))


def test_each_worker_is_counted_under_one_cause() -> None:
    fault = diagnosed(
        ill(),
        ill(**NONE),
        broken(),
        worker(state=WorkerState.DRAINING),
        worker(state=WorkerState.PENDING, known=False),
        unreadable=2,
    )
    assert fault.metadata == {
        "registered": "7",
        "unhealthy": "2",
        "breaker_open": "1",
        "draining": "1",
        "pending": "3",
    }


def test_overload_says_when_to_come_back() -> None:
    assert diagnosed(busy()).retry_after == 3.0


def test_every_absence_has_its_count() -> None:
    states = {WorkerState.PENDING, WorkerState.UNHEALTHY, WorkerState.DRAINING, WorkerState.GONE}
    seen = [survey([worker(state=s)], PLAIN, RULE, NOW).judgements[0].absence for s in states]
    seen += [survey([one], PLAIN, RULE, NOW).judgements[0].absence for one in (busy(), broken())]
    assert set(seen) == set(Absence)


@pytest.mark.parametrize(
    ("constraint", "capability", "reason", "about"),
    [
        (
            WireConstraint("m", item_counts=(("image", 1), ("video", 5))),
            {"item_limits": {"image": 4, "video": 2}},
            Reason.TOO_MANY_MEDIA_ITEMS,
            {"modality": "video", "items": "5", "limit": "2"},
        ),
        (
            WireConstraint("m", largest_item_tokens=50),
            {"encoder_budget": 10},
            Reason.MEDIA_ITEM_OVER_ENCODER_BUDGET,
            {"tokens": "50", "limit": "10"},
        ),
        (
            WireConstraint("m", prompt_tokens=50),
            {"context_length": 10},
            Reason.PROMPT_TOO_LONG,
            {"tokens": "50", "limit": "10"},
        ),
        (
            REFS,
            {"schemes": frozenset({"http"})},
            Reason.MEDIA_REF_SCHEME_NOT_ACCEPTED,
            {"schemes": "file,http", "accepted": "http"},
        ),
        (
            WireConstraint("m", pixel_format=NORMAL),
            {},
            Reason.MALFORMED_TENSORS,
            {"check": "normalize"},
        ),
        # Tensors of the router's own making are not the client's fault.
        (
            WireConstraint("m", pixel_format=NORMAL, model_fingerprint="a"),
            {"fingerprint": "a"},
            Reason.NO_AVAILABLE_WORKER,
            {},
        ),
    ],
)
def test_a_lack_of_capability_is_told_in_numbers(
    constraint: WireConstraint,
    capability: dict[str, Any],
    reason: Reason,
    about: dict[str, str],
) -> None:
    fault = diagnosed(worker(**capability), constraint=constraint)
    assert fault.reason is reason
    assert about.items() <= fault.metadata.items()
    for key, value in about.items():
        if key in ("items", "limit", "tokens"):
            assert value in fault.message


def test_capability_is_asked_whatever_the_order_of_workers() -> None:
    lacking = [worker(**NONE), worker(schemes=frozenset({"http"})), worker(schemes=frozenset())]
    for order in product(lacking, repeat=2):
        admitted = [one for one in order if REFS.admits(one) is None]
        assert bool(survey(order, REFS, RULE, NOW).admissible) == bool(admitted)
