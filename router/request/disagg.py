"""Prefill/decode pairs: two workers for one request.

NIXL: the prefill leg answers with the parameters of the transfer, which go to
the decode leg as they are. Mooncake: the router mints the transfer's id, and
both legs run at once. The first leg that fails ends the other; a retry takes a
fresh pair and fresh ids under the same constraint.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from router.faults import Fault, Reason
from router.fleet.breaker import CallResult
from router.fleet.role import effective_role
from router.fleet.worker import Lease, Role, Worker
from router.observe.logging import get_logger
from router.observe.metrics import Metrics
from router.policy.base import Policy, RoutingView
from router.policy.least_load import LeastLoad
from router.request import failure, relay
from router.request.constraint import WireConstraint
from router.request.dispatch import Attempt, Dispatcher, Journey, Once, Order
from router.request.failure import Again, PassThrough
from router.request.legs import (
    BOOTSTRAP_LABEL,
    MOONCAKE,
    Handoff,
    decode_body,
    incompatibility,
    mooncake_handoff,
    prefill_body,
)
from router.request.prepared import Body
from router.request.relay import AttemptFailed
from router.request.select import Survey, pick
from router.wire import engine

_log = get_logger("request")

Stream = Callable[[Attempt, bytes], Awaitable[None]]
"""Calls a worker with these bytes and relays its answer to the client."""


@dataclass(frozen=True)
class PairSettings:
    """`min_tokens`: shorter prompts go straight to a decode worker, 0 for none.

    `refetch`: send references along to the decode leg when the prefill leg
    returned no identity, instead of failing.
    """

    min_tokens: int = 0
    refetch: bool = True


class LegFault(Fault):
    """One leg of a pair failed; `cause` is the failure itself."""

    def __init__(self, leg: str, cause: Fault) -> None:
        super().__init__(
            Reason.LEG_FAILED,
            f"the {leg} leg failed: {cause.message}",
            metadata={**cause.metadata, "leg": leg, "cause": cause.reason.name},
            retry_after=cause.retry_after,
        )
        self.cause = cause


@dataclass(frozen=True)
class Pair:
    prefill: Lease
    decode: Lease


def is_disaggregated(workers: Sequence[Worker]) -> bool:
    """Whether a model is served by pairs: it has workers for either leg."""
    roles = {effective_role(worker) for worker in workers}
    return {Role.PREFILL, Role.DECODE} <= roles


class Pairs:
    """Carries out orders on pairs of workers."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics, settings: PairSettings) -> None:
        self.settings = settings
        self._dispatcher = dispatcher
        self._metrics = metrics
        # The decode leg is chosen by load alone: it computes no prompt.
        self._decode_policy: Policy = LeastLoad(dispatcher.rng)

    def surveys(
        self, constraint: WireConstraint, tried: frozenset[Worker] = frozenset()
    ) -> tuple[Survey, Survey]:
        """Every prefill and every decode worker against one constraint."""
        return (
            self._dispatcher.survey(_for_role(constraint, Role.PREFILL), tried),
            self._dispatcher.survey(_for_role(constraint, Role.DECODE), tried),
        )

    def direct(self, order: Order) -> Order | None:
        """The order for a decode worker alone, where its prompt is too short to be worth a pair."""
        if order.view.prompt_tokens >= self.settings.min_tokens:
            return None
        alone = replace(order, constraint=_for_role(order.constraint, Role.DECODE))
        return alone if self._dispatcher.survey(alone.constraint).admissible else None

    def select(self, order: Order, tried: frozenset[Worker]) -> Pair:
        """Chooses and reserves both legs in one uninterrupted step. Raises `Fault`."""
        prefill, decode = self._choose(order.constraint, order.view, tried)
        first = prefill.lease(order.view.prompt_tokens)
        # The prompt is computed on the other side.
        second = decode.lease(0)
        if first is None or second is None:
            for lease in (first, second):
                if lease is not None:
                    lease.release(CallResult.NEUTRAL)
            raise Fault(Reason.NO_AVAILABLE_WORKER, "a leg of the pair was taken meanwhile")
        self._dispatcher.policy.reserved(order.view, prefill)
        return Pair(first, second)

    def would_pick(self, constraint: WireConstraint, view: RoutingView) -> str:
        """The pair that would be chosen now, as `PREFILL+DECODE`; empty when there is none."""
        try:
            prefill, decode = self._choose(constraint, view, frozenset())
        except Fault:
            return ""
        return f"{prefill.address}+{decode.address}"

    def _choose(
        self, constraint: WireConstraint, view: RoutingView, tried: frozenset[Worker]
    ) -> tuple[Worker, Worker]:
        prefills, decodes = self.surveys(constraint, tried)
        for seen in (prefills, decodes):
            if not seen.admissible:
                raise seen.fault(retry_after=self._dispatcher.shed_hint)
        candidates = [p for p in prefills.admissible if _partners(p, decodes.admissible)]
        if not candidates:
            raise _no_pair(prefills.admissible, decodes.admissible)
        prefill = candidates[pick(self._dispatcher.policy, view, candidates)]
        partners = _partners(prefill, decodes.admissible)
        return prefill, partners[pick(self._decode_policy, view, partners)]

    def once(self, body: Callable[[], Body], stream: Stream, journey: Journey) -> Once:
        """One attempt with a fresh pair, in the form that `Dispatcher.run` asks for."""

        async def attempt(
            order: Order, tried: frozenset[Worker]
        ) -> tuple[AttemptFailed | None, frozenset[Worker]]:
            pair = self.select(order, tried)
            workers = frozenset({pair.prefill.worker, pair.decode.worker})
            try:
                await self._carry(order, pair, body(), stream, journey)
            except AttemptFailed as failed:
                return failed, workers
            finally:
                # Whatever was not released by its own leg.
                pair.prefill.release(CallResult.NEUTRAL)
                pair.decode.release(CallResult.NEUTRAL)
            return None, workers

        return attempt

    async def _carry(
        self, order: Order, pair: Pair, body: Body, stream: Stream, journey: Journey
    ) -> None:
        prefill = self._dispatcher.attempt(order, pair.prefill.worker)
        decode = self._dispatcher.attempt(order, pair.decode.worker)
        capability = pair.prefill.worker.capability
        minted = ""
        if capability is not None and capability.kv_connector == MOONCAKE:
            minted = f"xfer-{uuid.uuid4().hex}"
        first = prefill_body(body, minted)
        journey.attempts += 1
        journey.worker = f"{prefill.worker.address}+{decode.worker.address}"
        journey.progress = decode.progress
        try:
            if minted and not body.request.HasField("media_refs"):
                await self._at_once(order, pair, (prefill, decode), first, body, minted, stream)
            else:
                handoff = await self._prefill(order, pair.prefill, prefill, first)
                if minted and capability is not None:
                    known = self._mooncake(prefill.worker, minted)
                    handoff = replace(known, identity=handoff.identity)
                await self._decode(order, pair.decode, decode, body, handoff, stream)
        finally:
            if prefill.progress.completes and not decode.progress.started:
                # Blocks wait on the prefill side for a decode that will not fetch them.
                self._dispatcher.abort_soon(prefill)

    async def _at_once(
        self,
        order: Order,
        pair: Pair,
        attempts: tuple[Attempt, Attempt],
        first: Body,
        body: Body,
        minted: str,
        stream: Stream,
    ) -> None:
        prefill, decode = attempts
        handoff = self._mooncake(prefill.worker, minted)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._prefill(order, pair.prefill, prefill, first))
                group.create_task(self._decode(order, pair.decode, decode, body, handoff, stream))
        except BaseExceptionGroup as failed:
            raise _first_failed(failed) from None

    async def _prefill(self, order: Order, lease: Lease, attempt: Attempt, body: Body) -> Handoff:
        completes: list[engine.GenerateComplete] = []

        async def exchange(attempt: Attempt) -> None:
            async def collect(message: bytes) -> None:
                response = engine.GenerateResponse.FromString(message)
                if response.HasField("complete"):
                    completes.append(response.complete)

            await self._stream(attempt, body.wire(attempt.id), collect, order.remote_media)

        failed = await self._dispatcher.carry(order, lease, attempt, exchange)
        if failed is not None:
            raise _leg_failed("prefill", failed, started=False)
        complete = completes[-1]
        identity = complete.media_identity if complete.HasField("media_identity") else None
        return Handoff(complete.kv_transfer_params_json, identity)

    async def _decode(
        self,
        order: Order,
        lease: Lease,
        attempt: Attempt,
        body: Body,
        handoff: Handoff,
        stream: Stream,
    ) -> None:
        if not handoff.transfer_params:
            raise AttemptFailed(failure.no_handoff())
        if body.request.HasField("media_refs") and handoff.identity is None:
            self._metrics.missing_identity.inc()
            _log.warning("no_media_identity", worker=attempt.worker.address)
        second = decode_body(body, handoff, refetch=self.settings.refetch)

        async def exchange(attempt: Attempt) -> None:
            await stream(attempt, second.wire(attempt.id))

        failed = await self._dispatcher.carry(order, lease, attempt, exchange)
        if failed is not None:
            raise _leg_failed("decode", failed, started=attempt.progress.started)

    async def _stream(
        self, attempt: Attempt, wire: bytes, write: relay.Write, remote_media: bool
    ) -> None:
        call = self._dispatcher.call(attempt, wire)
        await relay.stream(
            call,
            write,
            choices=1,
            limits=self._dispatcher.limits,
            progress=attempt.progress,
            remote_media=remote_media,
            on_first=lambda: None,
        )

    def _mooncake(self, worker: Worker, transfer_id: str) -> Handoff:
        engine_id = worker.capability.kv_engine_id if worker.capability else ""
        port = worker.labels.get(BOOTSTRAP_LABEL)
        return mooncake_handoff(worker.address, port, engine_id, transfer_id)


def _for_role(constraint: WireConstraint, role: Role) -> WireConstraint:
    return replace(constraint, roles=frozenset({role}))


def _partners(prefill: Worker, decodes: list[Worker]) -> list[Worker]:
    return [d for d in decodes if _difference(prefill, d) is None]


def _difference(prefill: Worker, decode: Worker) -> str | None:
    if prefill.capability is None or decode.capability is None:
        return "metadata_unknown"
    return incompatibility(prefill.capability, decode.capability)


def _no_pair(prefills: list[Worker], decodes: list[Worker]) -> Fault:
    causes = Counter(_difference(p, d) or "" for p in prefills for d in decodes)
    cause, _ = causes.most_common(1)[0]
    return Fault(
        Reason.NO_COMPATIBLE_PAIR,
        f"no prefill worker can hand over to a decode worker: they differ in {cause}",
        metadata={"cause": cause, "prefill": str(len(prefills)), "decode": str(len(decodes))},
    )


def _leg_failed(leg: str, failed: AttemptFailed, *, started: bool) -> AttemptFailed:
    """A leg's failure as the pair's: named, unless it is the client's own."""
    if isinstance(failed.why.fault, PassThrough):
        return failed
    why = replace(
        failed.why,
        fault=LegFault(leg, failed.why.fault),
        again=Again.NO if started else failed.why.again,
    )
    return AttemptFailed(why)


def _first_failed(group: BaseExceptionGroup[BaseException]) -> BaseException:
    return group.exceptions[0]
