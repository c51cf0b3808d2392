"""Choosing a worker: filter, choose and reserve in one uninterrupted step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from router.faults import Fault, Reason
from router.fleet.breaker import CallResult
from router.fleet.worker import Lease, Worker, WorkerState
from router.policy.base import Policy, RoutingView
from router.request.constraint import Cause, WireConstraint, nearest_to_admission
from router.request.incapable import incapable


class Absence(Enum):
    """Why a worker that could serve the request cannot have it now."""

    PENDING = "pending"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    BREAKER_OPEN = "breaker_open"
    OVERLOADED = "overloaded"


_BY_STATE = {
    WorkerState.PENDING: Absence.PENDING,
    WorkerState.UNHEALTHY: Absence.UNHEALTHY,
    WorkerState.DRAINING: Absence.DRAINING,
    WorkerState.GONE: Absence.DRAINING,
}


@dataclass(frozen=True)
class OverloadRule:
    """When a worker has too much to do; `max_age` (seconds) is how old a report may be."""

    shed: bool = True
    waiting: int = 64
    kv_usage: float = 0.98
    max_age: float = 10.0

    def overloaded(self, worker: Worker, now: float) -> bool:
        """Judges by the worker's own report and by what we have there ourselves.

        What is not known does not count as load.
        """
        if not self.shed:
            return False
        running = worker.capability.max_num_seqs if worker.capability else None
        if running and worker.load.in_flight >= running + self.waiting:
            return True
        report = worker.load.reported
        if report is None or now - report.at > self.max_age:
            return False
        waiting = report.waiting or 0
        full = report.kv_usage is not None and report.kv_usage >= self.kv_usage
        return waiting >= max(1, self.waiting) or (full and waiting > 0)


class Judgement(NamedTuple):
    """One worker against one request: admitted when both are None."""

    worker: Worker
    cause: Cause | None
    absence: Absence | None


@dataclass(frozen=True)
class Survey:
    """Every registered worker of the model, judged by a constraint; None where there is none."""

    judgements: Sequence[Judgement]
    constraint: WireConstraint | None = None
    unreadable: int = 0
    tried: Collection[Worker] = field(default_factory=frozenset)

    @property
    def admissible(self) -> list[Worker]:
        """Who may get the request; workers tried already only when nobody else is left."""
        free = [j.worker for j in self.judgements if j.cause is None and j.absence is None]
        fresh = [worker for worker in free if worker not in self.tried]
        return fresh or free

    def fault(self, *, retry_after: float) -> Fault:
        """Why nobody is admissible, in the order of the error table.

        What passes by itself (ill health, an open breaker, overload) is named
        before what does not; capability is blamed only when it alone emptied
        an otherwise usable pool.
        """
        up = [j for j in self.judgements if j.absence in (None, Absence.OVERLOADED)]
        capable = any(j.cause is None for j in self.judgements)
        capable_up = any(j.cause is None for j in up)
        if not up or (capable and not capable_up):
            return self._unavailable()
        if capable_up or all(j.absence is Absence.OVERLOADED for j in up):
            return Fault(
                Reason.OVERLOADED,
                "every worker that could serve the request is overloaded",
                metadata=self._counts(),
                retry_after=retry_after,
            )
        return self._incapable([j for j in up if j.absence is None])

    def _unavailable(self) -> Fault:
        if not self.judgements and not self.unreadable:
            message = "no worker is registered"
        else:
            message = "no worker for the request is available"
        return Fault(Reason.NO_AVAILABLE_WORKER, message, metadata=self._counts())

    def _counts(self) -> dict[str, str]:
        counts: Counter[str] = Counter()
        for judgement in self.judgements:
            if judgement.absence is not None:
                counts[judgement.absence.value] += 1
            elif judgement.cause is not None:
                counts[judgement.cause.value] += 1
        if self.unreadable:
            counts[Absence.PENDING.value] += self.unreadable
        registered = len(self.judgements) + self.unreadable
        return {"registered": str(registered), **{k: str(v) for k, v in sorted(counts.items())}}

    def _incapable(self, free: list[Judgement]) -> Fault:
        assert self.constraint is not None, "nothing refused them"
        cause = nearest_to_admission([j.cause for j in free if j.cause is not None])
        refusing = [j.worker for j in free if j.cause is cause]
        return incapable(cause, self.constraint, refusing, self._counts())


def survey(
    workers: Sequence[Worker],
    constraint: WireConstraint,
    overload: OverloadRule,
    now: float,
    *,
    tried: Collection[Worker] = frozenset(),
    unreadable: int = 0,
) -> Survey:
    """Judges every worker of a model. `unreadable` counts workers whose model is not known."""
    judgements = [
        Judgement(worker, constraint.admits(worker), _absence(worker, overload, now))
        for worker in workers
    ]
    return Survey(judgements, constraint, unreadable, tried)


def select(seen: Survey, view: RoutingView, policy: Policy, *, retry_after: float) -> Lease:
    """Picks an admissible worker and reserves its load. Raises `Fault`.

    There is no await between the judging and the reserving, so what was
    judged is what is reserved.
    """
    candidates = seen.admissible
    while candidates:
        position = pick(policy, view, candidates)
        chosen = candidates[position]
        charge = policy.charge(view, chosen)
        lease = chosen.lease(view.prompt_tokens, charge, told=view.told)
        if lease is not None:
            try:
                policy.reserved(view, lease.worker)
            except BaseException:
                lease.release(CallResult.NEUTRAL)
                raise
            return lease
        del candidates[position]
    raise seen.fault(retry_after=retry_after)


def pick(policy: Policy, view: RoutingView, candidates: Sequence[Worker]) -> int:
    """The position of the one that the policy would choose now."""
    return policy.choose(view, candidates) if len(candidates) > 1 else 0


def _absence(worker: Worker, overload: OverloadRule, now: float) -> Absence | None:
    if worker.state is not WorkerState.READY:
        return _BY_STATE[worker.state]
    if not worker.breaker.admits():
        return Absence.BREAKER_OPEN
    return Absence.OVERLOADED if overload.overloaded(worker, now) else None
