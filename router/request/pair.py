"""Choosing two workers for one request, and reserving both in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.faults import Fault, Reason
from router.fleet.breaker import CallResult
from router.fleet.role import effective_role
from router.fleet.worker import Lease, Role, Worker
from router.policy.base import RoutingView
from router.request.constraint import Cause, WireConstraint
from router.request.dispatch import Dispatcher
from router.request.legs import incompatibility
from router.request.select import Survey, pick

LEGS = (Role.PREFILL, Role.DECODE)
# Requests that a worker runs at once, where it does not say.
_ORDINARY_SLOTS = 256


def is_disaggregated(workers: Sequence[Worker]) -> bool:
    """Whether a model's requests go to pairs.

    They do once it has workers for both legs; and while it has workers for one
    leg and none that does both, since nobody else could serve it.
    """
    roles = {effective_role(worker) for worker in workers}
    legs = roles & set(LEGS)
    return len(legs) == len(LEGS) or (bool(legs) and Role.BOTH not in roles)


@dataclass(frozen=True)
class Pair:
    """Two reserved workers."""

    prefill: Lease
    decode: Lease

    @property
    def workers(self) -> frozenset[Worker]:
        return frozenset({self.prefill.worker, self.decode.worker})

    def release(self) -> None:
        """Gives back whatever no call has given back."""
        self.prefill.release(CallResult.NEUTRAL)
        self.decode.release(CallResult.NEUTRAL)


class Pairing:
    """Chooses pairs: the prefill leg by the policy, the decode leg by how full it is.

    A decode leg computes no prompt, so what it has cached of it is worth nothing,
    and it waits for nobody's: what counts are the requests that share each step.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def policies(self, model: str) -> tuple[str, str]:
        """The names of what chooses the prefill and the decode leg."""
        return self._dispatcher.policies.of(model).name, "least_full"

    def surveys(self, constraint: WireConstraint) -> tuple[Survey, Survey]:
        """Every prefill and every decode worker, against one constraint."""
        prefills, decodes = (self._survey(constraint, role) for role in LEGS)
        return prefills, decodes

    def check(self, constraint: WireConstraint, *, alone: bool) -> None:
        """Raises the `Fault` that a selection would raise now.

        With `alone` a decode worker by itself is enough.
        """
        if alone:
            self._admissible(constraint, Role.DECODE)
        else:
            self._candidates(constraint, frozenset())

    def choose(
        self, constraint: WireConstraint, view: RoutingView, tried: frozenset[Worker] = frozenset()
    ) -> tuple[Worker, Worker]:
        """The pair to take now. Raises `Fault`."""
        candidates = self._candidates(constraint, tried)
        prefills = list(candidates)
        policy = self._dispatcher.policies.of(constraint.model)
        prefill = prefills[pick(policy, view, prefills)]
        partners = candidates[prefill]
        least = min(map(_fullness, partners))
        emptiest = [d for d in partners if _fullness(d) == least]
        return prefill, self._dispatcher.rng.choice(emptiest)

    def reserve(
        self, constraint: WireConstraint, view: RoutingView, tried: frozenset[Worker]
    ) -> Pair:
        """Chooses and reserves both legs in one uninterrupted step. Raises `Fault`."""
        prefill, decode = self.choose(constraint, view, tried)
        policy = self._dispatcher.policies.of(constraint.model)
        first = prefill.lease(view.prompt_tokens, policy.charge(view, prefill))
        # Its context is as long, but it is computed on the other side: how long that
        # takes tells nothing of the speed of this one.
        second = decode.lease(view.prompt_tokens, 0, told=False)
        assert first is not None and second is not None, "admitted in this very step"
        pair = Pair(first, second)
        try:
            policy.reserved(view, prefill)
        except BaseException:
            pair.release()
            raise
        return pair

    def _candidates(
        self, constraint: WireConstraint, tried: frozenset[Worker]
    ) -> dict[Worker, list[Worker]]:
        """Prefill workers with the decode workers that fit each.

        Workers tried before come in only where no pair can be made without them.
        """
        prefills, decodes = (self._admissible(constraint, role) for role in LEGS)
        for firsts in ([p for p in prefills if p not in tried], prefills):
            for seconds in ([d for d in decodes if d not in tried], decodes):
                if candidates := _fitting(firsts, seconds):
                    return candidates
        raise _no_pair(prefills, decodes)

    def _admissible(self, constraint: WireConstraint, role: Role) -> list[Worker]:
        seen = self._survey(constraint, role)
        if not seen.admissible:
            fault = seen.fault(retry_after=self._dispatcher.shed_hint)
            fault.metadata["leg"] = role.value
            raise fault
        return seen.admissible

    def _survey(self, constraint: WireConstraint, role: Role) -> Survey:
        seen = self._dispatcher.survey(replace(constraint, roles=frozenset({role})))
        # The other leg's workers are judged there.
        own = [j for j in seen.judgements if j.cause is not Cause.OTHER_ROLE]
        return replace(seen, judgements=own)


def _fullness(worker: Worker) -> float:
    """Requests at a decode worker, as a share of those that it runs at once.

    Other routers' requests are known by the worker's last report alone.
    """
    report = worker.load.reported
    told = (report.running or 0) + (report.waiting or 0) if report else 0
    slots = worker.capability.max_num_seqs if worker.capability else None
    return max(worker.load.in_flight, told) / (slots or _ORDINARY_SLOTS)


def _fitting(prefills: list[Worker], decodes: list[Worker]) -> dict[Worker, list[Worker]]:
    """The prefill workers that have any, with the decode workers that fit each."""
    kinds = _by_kind(decodes)
    partners: dict[object, list[Worker]] = {}
    for prefill in prefills:
        if (kind := _kind(prefill)) not in partners:
            fitting = (same for same in kinds.values() if not _difference(prefill, same[0]))
            partners[kind] = [decode for same in fitting for decode in same]
    return {p: partners[_kind(p)] for p in prefills if partners[_kind(p)]}


def _by_kind(workers: list[Worker]) -> dict[object, list[Worker]]:
    """By what a pair must agree in: of that a fleet has few kinds, and may have many workers."""
    kinds: dict[object, list[Worker]] = {}
    for worker in workers:
        kinds.setdefault(_kind(worker), []).append(worker)
    return kinds


def _kind(worker: Worker) -> object:
    return worker.capability and worker.capability.pairing


def _difference(prefill: Worker, decode: Worker) -> str | None:
    ours, theirs = prefill.capability, decode.capability
    assert ours is not None and theirs is not None, "nobody is admitted unread"
    return incompatibility(ours, theirs)


def _no_pair(prefills: list[Worker], decodes: list[Worker]) -> Fault:
    causes: Counter[str] = Counter()
    for firsts in _by_kind(prefills).values():
        for seconds in _by_kind(decodes).values():
            causes[_difference(firsts[0], seconds[0]) or ""] += len(firsts) * len(seconds)
    cause, _ = causes.most_common(1)[0]
    return Fault(
        Reason.NO_COMPATIBLE_PAIR,
        f"no prefill worker can hand over to a decode worker: {cause} keeps them apart",
        metadata={"cause": cause, "prefill": str(len(prefills)), "decode": str(len(decodes))},
    )
