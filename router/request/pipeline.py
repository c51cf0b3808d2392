"""One Generate from its parsed request to its end, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, replace

from router.faults import Fault, Reason
from router.fleet.model import Model
from router.fleet.worker import Role
from router.media.intake import MediaIntake
from router.media.ticket import Ticket
from router.observe.logging import get_logger
from router.observe.metrics import Metrics
from router.policy.base import RoutingView
from router.request import migrate, relay
from router.request.active import Aborted, ActiveRequest, ActiveRequests, too_late
from router.request.admission import Admission
from router.request.attempt import Attempt, Order
from router.request.constraint import WireConstraint
from router.request.decide import Decided, Decider
from router.request.disagg import Exchange, Pairs
from router.request.dispatch import Dispatcher, unary
from router.request.failure import Media
from router.request.prepare import Admit, Preparer
from router.request.prepared import Prepared
from router.request.ready import Ready
from router.request.record import Record
from router.request.relay import ClientGone, Write
from router.request.resolve import Mode, Resolution, Why
from router.request.worker_media import SomeItemFault
from router.wire import engine

_log = get_logger("request")

# Schemes behind which there is a host that may fail by itself.
_HOSTED = frozenset({"http", "https"})
# Reasons of a mode that say nothing of how the model's other requests fare.
_OF_ONE_REQUEST = frozenset({Why.OVERRIDE, Why.PLAN_NOT_FORWARDABLE})
_ANY_ROLE = frozenset({Role.BOTH, Role.PREFILL, Role.DECODE})


async def _anyone(_: Prepared) -> None:
    """Refuses nothing: `explain` shows what the workers would say."""


@dataclass(frozen=True)
class PipelineSettings:
    """`request_timeout` is in seconds."""

    allow_client_hashes: bool = False
    migration: bool = False
    merge_chunks: bool = True
    request_timeout: float = 600.0


class Pipeline:
    """Runs requests. One for the whole process."""

    def __init__(
        self,
        decider: Decider,
        intake: MediaIntake,
        preparer: Preparer,
        dispatcher: Dispatcher,
        pairs: Pairs,
        admission: Admission,
        metrics: Metrics,
        settings: PipelineSettings,
    ) -> None:
        self.dispatcher = dispatcher
        self.pairs = pairs
        self.admission = admission
        self.active = ActiveRequests()
        self.decider = decider
        self._intake = intake
        self._preparer = preparer
        self._metrics = metrics
        self._settings = settings
        # The last one of each model and mixture of modalities.
        self.resolutions: dict[tuple[str, frozenset[str]], Resolution] = {}
        # The same without those that were a single request's own doing.
        self._told: dict[tuple[str, frozenset[str]], Resolution] = {}

    async def generate(
        self,
        request: engine.GenerateRequest,
        *,
        model: str,
        time_left: float | None,
        write: Write,
        record: Record,
    ) -> None:
        """Serves one request: every message of its worker goes to `write`.

        `model` is the name asked for, or empty. `time_left` is the client's
        deadline in seconds from now. Raises `Fault`, or CancelledError when
        the client is gone.
        """
        # So that a request that is refused before it is looked at counts as its model's.
        record.model = self.decider.counted_as(request.router.model or model)
        deadline = self._deadline(time_left)
        choices = max(1, request.sampling_params.n)
        references = len(request.media_refs.items)
        merge = self._settings.merge_chunks and not request.router.one_chunk_a_message
        active = self.active.running(record.request_id, deadline, lambda: _late(record))
        try:
            async with active as owner, self.admission.place():
                with self._intake.ticket() as ticket:
                    ready = await self._prepared(request, model, deadline, record, ticket)
                    await self._serve(ready, choices, merge, deadline, write, record, owner)
        except SomeItemFault as fault:
            if references != 1:
                raise
            raise fault.at(0) from fault
        except Aborted:
            record.journey.progress.finish_reasons.append("abort")
            completed = record.journey.progress.completes
            ends = [_aborted(index) for index in range(choices) if index not in completed]
            await _tell_in_time(write, ends, deadline)

    def _serve(
        self,
        ready: Ready,
        choices: int,
        merge: bool,
        deadline: float,
        write: Write,
        record: Record,
        active: ActiveRequest,
    ) -> Awaitable[None]:
        # Here and below plain functions hand awaitables on: each coroutine between the
        # client's task and the stream would be passed through twice a message.
        order = Order(
            request_id=record.request_id,
            constraint=ready.constraint,
            view=ready.view,
            deadline=deadline,
            media=_media(ready.constraint.schemes),
            references=ready.references,
            active=active,
        )

        def stream(attempt: Attempt, wire: bytes, media: Media) -> Awaitable[None]:
            def begin() -> None:
                attempt.lease.first_output()
                ready.first_output()

            attempt.on_break = ready.move
            return relay.stream(
                self.dispatcher.call(attempt, wire),
                write,
                choices=choices,
                limits=self.dispatcher.limits,
                progress=attempt.progress,
                media=media,
                on_first=begin,
                through=ready.through,
                merge=merge,
            )

        async def share(attempt: Attempt) -> None:
            async with self.dispatcher.sharing(ready.body.batches, attempt) as handles:
                wire = await ready.body.wire_of(attempt.id, handles)
                relaying = stream(attempt, wire, order.media)
                del wire
                await relaying

        def exchange(attempt: Attempt) -> Awaitable[None]:
            if ready.body.batches:
                return share(attempt)
            return stream(attempt, ready.body.wire(attempt.id), order.media)

        journey = record.journey
        once = self.dispatcher.single(exchange, journey)
        if ready.pairs:
            params = ready.body.request.sampling_params
            if alone := self.pairs.alone(order.constraint, order.view, params):
                order = replace(order, constraint=alone)
            else:
                once = self.pairs.once(Exchange(lambda: ready.body, stream, write), journey)
        return self.dispatcher.run(order, once, journey)

    async def embed(
        self, request: engine.EmbedRequest, *, model: str, time_left: float | None, record: Record
    ) -> bytes:
        """Serves one Embed; returns the worker's answer as it came. Raises `Fault`, `Aborted`."""
        record.model = self.decider.counted_as(model)
        if not request.tokenized.input_ids:
            raise Fault(Reason.INVALID_REQUEST, "tokenized.input_ids is empty")
        name = record.model = self.decider.model_name(model)
        tokens = len(request.tokenized.input_ids)
        deadline = self._deadline(time_left)
        order = Order(
            request_id=record.request_id,
            constraint=WireConstraint(name, prompt_tokens=tokens, roles=_ANY_ROLE),
            view=RoutingView(tokens),
            method="Embed",
            deadline=deadline,
        )
        answer = b""

        async def exchange(attempt: Attempt) -> None:
            nonlocal answer
            request.request_id = attempt.id
            attempt.begin()
            attempt.call = call = attempt.worker.embed(
                request.SerializeToString(),
                timeout=attempt.time_left(),
                metadata=attempt.headers or None,
            )
            answer = await unary(call, limits=self.dispatcher.limits, progress=attempt.progress)
            attempt.lease.first_output()

        running = self.active.running(record.request_id, deadline)
        async with running as active, self.admission.place():
            order = replace(order, active=active)
            once = self.dispatcher.single(exchange, record.journey)
            await self.dispatcher.run(order, once, record.journey)
        return answer

    async def _prepared(
        self,
        request: engine.GenerateRequest,
        model: str,
        deadline: float,
        record: Record,
        ticket: Ticket,
    ) -> Ready:
        with self.dispatcher.tracing.step("plan"):
            decided = self.decider.decide(request, model, record)
        self._tell(decided)
        if decided.resolution.mode is not Mode.NONE:
            # No work for a request that nobody can have; without media there is no work.
            await self._available(
                request, decided, self.decider.first_constraint(decided), deadline
            )
        routing_key = request.router.routing_key
        # Without a stream the answer comes in one piece; with one token that is the first output.
        told = request.stream or request.sampling_params.max_tokens == 1
        if decided.plan.tensors:
            # Held in memory as long as those that the router makes.
            await ticket.take_bytes(record.nbytes, 0)
        admit = self._admit(request, decided, deadline)
        try:
            prepared = await self.prepare(request, decided, ticket, admit)
        finally:
            record.unfetched = ticket.unfetched
        record.prompt_tokens = prepared.prompt_tokens
        continuation = None
        if (
            self._settings.migration
            and not decided.served.pairs
            and migrate.eligible(prepared.body.request)
        ):
            continuation = migrate.Continuation(decided.served.end_ids)
        return Ready(
            prepared,
            self.decider.constraint(decided, prepared),
            view_of(decided, prepared, routing_key, told=told),
            ticket,
            pairs=decided.served.pairs,
            continuation=continuation,
        )

    def prepare(
        self,
        request: engine.GenerateRequest,
        decided: Decided,
        ticket: Ticket,
        admit: Admit = _anyone,
    ) -> Awaitable[Prepared]:
        """Makes the body. What it takes of the media budget is on the ticket.

        `admit` may refuse it before pixels are worked on.
        """
        match decided.resolution.mode, decided.plan.tensors:
            case Mode.NONE, False:
                return self._preparer.text(
                    request, decided.served.files, decided.served.context_length, decided.interest
                )
            case Mode.NONE, True:
                return self._preparer.client_tensors(
                    request,
                    _known(decided),
                    decided.interest,
                    trust_hashes=self._settings.allow_client_hashes,
                )
            case Mode.WORKER, _:
                return self._preparer.forward(
                    request,
                    decided.plan,
                    _known(decided),
                    decided.served.model_path,
                    decided.interest,
                    served=decided.model,
                )
        return self._preparer.process(
            request,
            decided.plan,
            _known(decided),
            decided.served.model_path,
            self.decider.pixels_for(decided),
            ticket,
            decided.interest,
            admit,
        )

    async def abort(self, request_id: str) -> None:
        """Ends the requests under a client's id: each at the worker that has it, or here."""
        for request in self.active.of(request_id):
            # First these: a place that becomes free would let one of them begin.
            if not request.attempts:
                request.abort()
        attempts = self.dispatcher.running.of(request_id)
        await asyncio.gather(*(self.dispatcher.abort(attempt) for attempt in attempts))

    def _admit(self, request: engine.GenerateRequest, decided: Decided, deadline: float) -> Admit:
        async def admit(outline: Prepared) -> None:
            constraint = self.decider.constraint(decided, outline)
            await self._available(request, decided, constraint, deadline)

        return admit

    async def _available(
        self,
        request: engine.GenerateRequest,
        decided: Decided,
        constraint: WireConstraint,
        deadline: float,
    ) -> None:
        """Raises the `Fault` of a request that nobody can have, after a bounded wait."""

        def check() -> None:
            if decided.served.pairs:
                self.pairs.check(constraint, request.sampling_params)
            else:
                self.dispatcher.check(constraint)

        await self.dispatcher.available(check, deadline)

    def _deadline(self, time_left: float | None) -> float:
        """Loop time at which a request ends, whatever comes; `time_left` is the client's."""
        limit = self._settings.request_timeout
        seconds = limit if time_left is None else min(limit, time_left)
        return asyncio.get_running_loop().time() + seconds

    def _tell(self, decided: Decided) -> None:
        resolution = decided.resolution
        if resolution.mode is Mode.NONE:
            return
        self._metrics.mm_processing.labels(
            decided.model, resolution.mode.value, resolution.why.value
        ).inc()
        # One line a change, kept apart for each mixture of modalities.
        key = decided.model, decided.plan.modalities
        self.resolutions[key] = resolution
        if resolution.why not in _OF_ONE_REQUEST and self._told.get(key) != resolution:
            self._told[key] = resolution
            _log.info(
                "mm_processing",
                model=decided.model,
                modalities=sorted(decided.plan.modalities),
                mode=resolution.mode.value,
                reason=resolution.why.value,
            )


def view_of(
    decided: Decided, prepared: Prepared, routing_key: str, *, told: bool = True
) -> RoutingView:
    """What a policy may know of a prepared request."""
    credit = decided.interest.prefix_credit
    return RoutingView(prepared.prompt_tokens, routing_key, prepared.blocks, credit, told)


def _known(decided: Decided) -> Model:
    if decided.served.files is None:
        raise Fault(Reason.MULTIMODAL_NOT_SUPPORTED, "this model's files are not known")
    return decided.served.files


def _media(schemes: frozenset[str]) -> Media:
    if not schemes:
        return Media.NONE
    return Media.GIVEN if _HOSTED.isdisjoint(schemes) else Media.HOSTED


def _late(record: Record) -> Fault:
    """Why a request's time is over: a media host's fault where one was waited for."""
    if record.unfetched is None:
        return too_late()
    return Fault.of_item(
        Reason.MEDIA_FETCH_TIMEOUT,
        record.unfetched,
        "its host did not deliver before the request's time was over",
        limit="total",
    )


async def _tell_in_time(write: Write, messages: list[bytes], deadline: float) -> None:
    """Writes to a client for as long as its request may live. Raises `ClientGone`."""
    try:
        async with asyncio.timeout_at(deadline):
            for message in messages:
                await relay.tell(write, message)
    except TimeoutError:
        raise ClientGone from None  # it has stopped reading


def _aborted(index: int) -> bytes:
    """The end of a choice that was aborted before any worker had it."""
    complete = engine.GenerateComplete(index=index, finish_reason="abort")
    return engine.GenerateResponse(complete=complete).SerializeToString()
