"""Prefill/decode pairs: two workers for one request.

NIXL: the prefill leg answers with the parameters of the transfer, which go to
the decode leg as they are. Mooncake: the router mints the transfer's id, and
both legs run at once. The first leg that fails ends the other; a retry takes a
fresh pair and fresh ids under the same constraint.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from router.faults import Fault, Reason
from router.fleet.capability import Capability
from router.fleet.worker import Role, Worker
from router.observe.logging import get_logger
from router.observe.metrics import Metrics
from router.policy.base import RoutingView
from router.request import failure, relay
from router.request.attempt import Attempt, Journey, Order
from router.request.constraint import WireConstraint
from router.request.dispatch import Dispatcher, Once
from router.request.failure import Media, PassThrough
from router.request.identity import identifies
from router.request.legs import (
    BOOTSTRAP_LABEL,
    MOONCAKE,
    Handoff,
    decode_body,
    mooncake_handoff,
    prefill_body,
)
from router.request.pair import Pair, Pairing
from router.request.prepared import Body
from router.request.relay import AttemptFailed, Write
from router.wire import engine

_log = get_logger("request")

_ALONE = frozenset({Role.DECODE, Role.BOTH})
# What these say is about the request, whichever leg says it.
_OF_THE_REQUEST = frozenset(
    {Reason.MESSAGE_TOO_LARGE} | {r for r in Reason if r.name.startswith("MEDIA_")}
)


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
class Exchange:
    """What one request brings to each of its attempts.

    `body` makes the body anew, so that nobody keeps it: it holds megabytes,
    which are let go at the first output. `stream` calls a worker with these
    bytes (and which media it has to read for them) and relays its answer to the
    client, `write` tells the client something else.
    """

    body: Callable[[], Body]
    stream: Callable[[Attempt, bytes, Media], Awaitable[None]]
    write: Write


class Pairs:
    """Carries out orders on pairs of workers."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics, settings: PairSettings) -> None:
        self.pairing = Pairing(dispatcher)
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._settings = settings

    def check(self, constraint: WireConstraint, params: engine.SamplingParams) -> None:
        """Raises the `Fault` of a request that nobody could have now, whatever its length."""
        if params.HasField("prompt_logprobs"):
            self._dispatcher.check(replace(constraint, roles=_ALONE))
        else:
            self.pairing.check(constraint, alone=self._settings.min_tokens > 0)

    def alone(
        self, constraint: WireConstraint, view: RoutingView, params: engine.SamplingParams
    ) -> WireConstraint | None:
        """The constraint of one worker that does both; None for a request that takes a pair.

        A short prompt is not worth the handoff, while a worker is free to
        compute it. Logprobs of the prompt have whoever computed it, so a decode
        leg could not tell them.
        """
        single = replace(constraint, roles=_ALONE)
        if params.HasField("prompt_logprobs"):
            return single
        if view.prompt_tokens >= self._settings.min_tokens:
            return None
        return single if self._dispatcher.survey(single).admissible else None

    def would_pick(self, constraint: WireConstraint, view: RoutingView) -> str:
        """The pair that would be chosen now, as `PREFILL+DECODE`; empty when there is none."""
        try:
            prefill, decode = self.pairing.choose(constraint, view)
        except Fault:
            return ""
        return f"{prefill.address}+{decode.address}"

    def once(self, exchange: Exchange, journey: Journey) -> Once:
        """One attempt with a fresh pair, in the form that `Dispatcher.run` asks for."""

        async def attempt(
            order: Order, tried: frozenset[Worker]
        ) -> tuple[AttemptFailed | None, frozenset[Worker]]:
            with self._dispatcher.tracing.step("select"):
                pair = self.pairing.reserve(order.constraint, order.view, tried)
            try:
                names = self.pairing.policies(order.constraint.model)
                for policy, leg in zip(names, ("prefill", "decode"), strict=True):
                    self._metrics.selections.labels(policy, leg).inc()
                legs = Legs(self._dispatcher, self._metrics, self._settings, order, pair, exchange)
                prefill, decode = legs.prefill.worker, legs.decode.worker
                journey.begin(f"{prefill.address}+{decode.address}", legs.decode.progress)
                await legs.run()
            except AttemptFailed as failed:
                # As in `Dispatcher.carry`: a traceback would keep both calls.
                return AttemptFailed(failed.why, grown=failed.grown), pair.workers
            finally:
                pair.release()
            return None, pair.workers

        return attempt


class Legs:
    """One attempt at one request: a call of either worker of a pair."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: Metrics,
        settings: PairSettings,
        order: Order,
        pair: Pair,
        exchange: Exchange,
    ) -> None:
        self.prefill = dispatcher.attempt(order, pair.prefill)
        self.decode = dispatcher.attempt(order, pair.decode)
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._settings = settings
        self._order = order
        self._exchange = exchange
        request = exchange.body().request
        self._choices = max(1, request.sampling_params.n)
        self._references = len(request.media_refs.items)
        self._transfer_id = ""
        if _capability(self.prefill.worker).kv_connector == MOONCAKE:
            self._transfer_id = f"xfer-{uuid.uuid4().hex}"
        # Whether the prefill worker may hold blocks for a decode worker to fetch.
        self._holding = False

    async def run(self) -> None:
        """Raises `AttemptFailed`; CancelledError, or what `write` raises, when the client is
        gone. Whatever happens, both calls are over when this returns.
        """
        try:
            if self._transfer_id and not self._references:
                await self._at_once()
            else:
                await self._one_after_the_other()
        finally:
            if self._holding and not self.decode.progress.started:
                self._dispatcher.abort_soon(self.prefill)

    async def _one_after_the_other(self) -> None:
        handoff = await self._run_prefill()
        if handoff is None:
            await self._tell_aborted()
            return
        if self._transfer_id:
            handoff = replace(self._agreed_handoff(), identity=handoff.identity)
        await self._run_decode(handoff)

    async def _at_once(self) -> None:
        prefill = asyncio.create_task(self._run_prefill(), name=f"prefill {self.prefill.id}")
        decode = asyncio.create_task(
            self._run_decode(self._agreed_handoff()), name=f"decode {self.decode.id}"
        )
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if prefill.done() and not self.decode.progress.started:
                # A decode leg that speaks has all that it needs; before that it waits in vain.
                prefill.result()
            await decode
        finally:
            prefill.cancel()
            decode.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)

    # -- The legs

    async def _run_prefill(self) -> Handoff | None:
        """What the leg left for the decode leg; None when the client had it aborted."""
        left: Handoff | None = None

        async def exchange(attempt: Attempt) -> None:
            nonlocal left
            completes: list[engine.GenerateComplete] = []

            async def collect(message: bytes) -> None:
                response = engine.GenerateResponse.FromString(message)
                if response.HasField("complete"):
                    completes.append(response.complete)

            body = prefill_body(self._exchange.body(), self._transfer_id)
            async with self._dispatcher.sharing(body.batches, attempt) as handles:
                call = self._dispatcher.call(attempt, await body.wire_of(attempt.id, handles))
                del body
                self._holding = True
                await relay.stream(
                    call,
                    collect,
                    choices=1,
                    limits=self._dispatcher.limits,
                    progress=attempt.progress,
                    media=self._order.media,
                    on_first=attempt.lease.first_output,
                )
            if attempt.aborted:
                self._holding = False
            else:
                left = self._handoff(completes)

        failed = await self._dispatcher.carry(self._order, self.prefill, exchange)
        if failed is not None:
            # A worker that failed by itself has let go of everything.
            self._holding = bool(self.prefill.progress.completes)
            raise _of_leg("prefill", failed)
        return left

    def _handoff(self, completes: list[engine.GenerateComplete]) -> Handoff:
        """Raises `AttemptFailed` when there is nothing to go on from."""
        complete = next((c for c in completes if c.kv_transfer_params_json), completes[-1])
        if complete.finish_reason in ("abort", "error"):
            raise AttemptFailed(failure.no_handoff(f"ended with {complete.finish_reason}"))
        if not complete.kv_transfer_params_json and not self._transfer_id:
            raise AttemptFailed(failure.no_handoff("returned no transfer parameters"))
        return Handoff(complete.kv_transfer_params_json, self._identity(complete))

    def _identity(self, complete: engine.GenerateComplete) -> engine.MediaIdentity | None:
        if not self._references:
            return None
        model = self.decode.worker.model
        spec = model.spec if model is not None else None
        if identifies(complete.media_identity, self._exchange.body().request, spec):
            return complete.media_identity
        self._metrics.missing_identity.inc()
        if not self._settings.refetch:
            raise AttemptFailed(failure.no_identity())
        worker = self.prefill.worker
        if not worker.told_anonymous:
            # The metric counts each; once is enough for people.
            worker.told_anonymous = True
            _log.warning("no_media_identity", worker=worker.address)
        return None

    async def _run_decode(self, handoff: Handoff) -> None:
        # Without their identity the references go along.
        media = self._order.media if handoff.identity is None else Media.NONE

        async def exchange(attempt: Attempt) -> None:
            body = decode_body(self._exchange.body(), handoff)
            wire = body.wire(attempt.id)
            del body
            relaying = self._exchange.stream(attempt, wire, media)
            del wire
            await relaying

        failed = await self._dispatcher.carry(self._order, self.decode, exchange)
        if failed is not None:
            raise _of_leg("decode", failed)

    def _agreed_handoff(self) -> Handoff:
        """What the decode leg of a Mooncake pair is told, which is known before any answer."""
        worker = self.prefill.worker
        port = worker.labels.get(BOOTSTRAP_LABEL)
        engine_id = _capability(worker).kv_engine_id
        return mooncake_handoff(worker.address, port, engine_id, self._transfer_id)

    async def _tell_aborted(self) -> None:
        """The end of every choice, for a client that aborted its request before any output."""
        for index in range(self._choices):
            self.decode.progress.finish_reasons.append("abort")
            complete = engine.GenerateComplete(
                index=index,
                finish_reason="abort",
                prompt_tokens=self.prefill.progress.prompt_tokens,
            )
            answer = engine.GenerateResponse(complete=complete)
            await relay.tell(self._exchange.write, answer.SerializeToString())


def _capability(worker: Worker) -> Capability:
    assert worker.capability is not None, "nobody is admitted unread"
    return worker.capability


def _of_leg(leg: str, failed: AttemptFailed) -> AttemptFailed:
    """A leg's failure as the pair's: named, unless it is the request's own."""
    fault = failed.why.fault
    named = fault.reason is Reason.LEG_FAILED
    if named or isinstance(fault, PassThrough) or fault.reason in _OF_THE_REQUEST:
        return failed
    return AttemptFailed(replace(failed.why, fault=LegFault(leg, fault)))
