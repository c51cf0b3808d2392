"""One Generate from its parsed request to its end, step by step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from router.faults import Fault, Reason
from router.fleet.model import Model
from router.fleet.registry import Registry
from router.fleet.role import effective_role
from router.fleet.worker import Role, Worker, WorkerState
from router.media.intake import MediaIntake
from router.media.ticket import Ticket
from router.observe.logging import get_logger
from router.observe.metrics import UNKNOWN_MODEL, Metrics
from router.policy.base import RoutingView
from router.request import migrate, relay
from router.request.admission import Admission
from router.request.constraint import WireConstraint, wanted_pixels
from router.request.disagg import Exchange, Pairs
from router.request.dispatch import Attempt, Dispatcher, Journey, Order, unary
from router.request.failure import movable
from router.request.migrate import Continuation
from router.request.pair import is_disaggregated
from router.request.plan import MediaPlan, plan
from router.request.prepare import Preparer
from router.request.prepared import Body, Prepared
from router.request.relay import AttemptFailed, Write
from router.request.resolve import Mode, ModelView, Resolution, Setting, resolve
from router.request.select import Survey
from router.vision.plan import PixelFormat
from router.wire import engine

_log = get_logger("request")

_ANY_ROLE = frozenset({Role.BOTH, Role.PREFILL, Role.DECODE})

_OVERRIDES: dict[int, Setting] = {
    engine.AUTO: "auto",
    engine.ROUTER: "router",
    engine.WORKER: "worker",
}


@dataclass(frozen=True)
class PipelineSettings:
    """`request_timeout` is in seconds."""

    mm_processing: Setting = "auto"
    allow_mm_override: bool = False
    allow_transfer_params: bool = False
    allow_client_hashes: bool = False
    migration: bool = False
    request_timeout: float = 600.0


@dataclass
class Record:
    """What is known of a request so far; filled as it goes, read when it ends."""

    request_id: str
    model: str = UNKNOWN_MODEL
    resolution: Resolution | None = None
    prompt_tokens: int = 0
    journey: Journey = field(default_factory=Journey)


@dataclass(frozen=True)
class Decided:
    """A request after its first steps: which model, which media, which mode."""

    model: str
    workers: Sequence[Worker]
    files: Model | None
    plan: MediaPlan
    resolution: Resolution

    @cached_property
    def pairs(self) -> bool:
        """Whether the model is served by prefill/decode pairs."""
        return is_disaggregated(self.workers)

    @property
    def roles(self) -> frozenset[Role]:
        """The roles of the workers that get the prompt and the media."""
        return frozenset({Role.PREFILL if self.pairs else Role.BOTH})

    @property
    def model_path(self) -> str:
        """The workers' own name for the model's files."""
        return next((w.capability.model_path for w in self.workers if w.capability), "")

    @property
    def context_length(self) -> int | None:
        """The longest context of the model's workers, in tokens; None while none is known."""
        known = [w.capability.context_length for w in self.workers if w.capability]
        return max((length for length in known if length), default=None)


class Pipeline:
    """Runs requests. One for the whole process."""

    def __init__(
        self,
        registry: Registry,
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
        self._registry = registry
        self._intake = intake
        self._preparer = preparer
        self._metrics = metrics
        self._settings = settings
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
        loop = asyncio.get_running_loop()
        limit = self._settings.request_timeout
        deadline = loop.time() + min(limit, limit if time_left is None else time_left)
        choices = max(1, request.sampling_params.n)
        routing_key = request.router.routing_key
        async with self.admission.place(), self._prepared(request, model, record) as ready:
            order = Order(
                request_id=record.request_id,
                constraint=ready.constraint,
                view=RoutingView(prompt_tokens=ready.prompt_tokens, routing_key=routing_key),
                deadline=deadline,
                remote_media=ready.constraint.requires_media_refs,
            )

            async def stream(attempt: Attempt, wire: bytes, remote_media: bool) -> None:
                call = self.dispatcher.call(attempt, wire)
                del wire
                try:
                    await relay.stream(
                        call,
                        write,
                        choices=choices,
                        limits=self.dispatcher.limits,
                        progress=attempt.progress,
                        remote_media=remote_media,
                        on_first=ready.first_output,
                        through=ready.through,
                    )
                except AttemptFailed as failed:
                    if attempt.progress.started:
                        ready.move(failed)
                    raise

            async def exchange(attempt: Attempt) -> None:
                async with self.dispatcher.sharing(ready.body.batches, attempt) as handles:
                    wire = ready.body.wire(attempt.id, handles)
                    relaying = stream(attempt, wire, order.remote_media)
                    del wire
                    await relaying

            journey = record.journey
            once = self.dispatcher.single(exchange, journey)
            if ready.pairs:
                params = ready.body.request.sampling_params
                if alone := self.pairs.alone(order.constraint, order.view, params):
                    order = replace(order, constraint=alone)
                else:
                    once = self.pairs.once(Exchange(lambda: ready.body, stream, write), journey)
                del params
            await self.dispatcher.run(order, once, journey)

    async def embed(
        self, request: engine.EmbedRequest, *, model: str, time_left: float | None, record: Record
    ) -> bytes:
        """Serves one Embed; returns the worker's answer as it came. Raises `Fault`."""
        if not request.tokenized.input_ids:
            raise Fault(Reason.INVALID_REQUEST, "tokenized.input_ids is empty")
        name = record.model = self.model_name(model)
        tokens = len(request.tokenized.input_ids)
        loop = asyncio.get_running_loop()
        limit = self._settings.request_timeout
        order = Order(
            request_id=record.request_id,
            constraint=WireConstraint(name, prompt_tokens=tokens, roles=_ANY_ROLE),
            view=RoutingView(tokens),
            method="Embed",
            deadline=loop.time() + min(limit, limit if time_left is None else time_left),
        )
        answer = b""

        async def exchange(attempt: Attempt) -> None:
            nonlocal answer
            request.request_id = attempt.id
            call = attempt.worker.embed(
                request.SerializeToString(),
                timeout=attempt.time_left(),
                metadata=attempt.headers or None,
            )
            answer = await unary(call, limits=self.dispatcher.limits, progress=attempt.progress)

        async with self.admission.place():
            once = self.dispatcher.single(exchange, record.journey)
            await self.dispatcher.run(order, once, record.journey)
        return answer

    # -- The steps before dispatch; `explain` takes the same ones

    def decide(self, request: engine.GenerateRequest, model: str, record: Record) -> Decided:
        """Model, plan and mode of a request; nothing is fetched. Raises `Fault`."""
        media = plan(request, allow_transfer_params=self._settings.allow_transfer_params)
        name = record.model = self.model_name(request.router.model or model)
        workers = self._registry.of_model(name)
        files = next((w.model for w in workers if w.model is not None), None)
        override = (
            _OVERRIDES.get(request.router.mm_processing)
            if self._settings.allow_mm_override
            else None
        )
        resolution = record.resolution = resolve(
            media, _view(workers, files), self._settings.mm_processing, override
        )
        return Decided(name, workers, files, media, resolution)

    def first_constraint(self, decided: Decided) -> WireConstraint:
        """What is known of the constraint before any media is fetched."""
        counts = Counter(item.modality for item in decided.plan.items)
        forwarded = decided.resolution.mode is Mode.WORKER
        return WireConstraint(
            model=decided.model,
            requires_media_refs=forwarded,
            schemes=decided.plan.schemes if forwarded else frozenset(),
            item_counts=tuple(sorted(counts.items())),
            roles=decided.roles,
        )

    def constraint(self, decided: Decided, prepared: Prepared) -> WireConstraint:
        """The constraint of the bytes that were built, for every attempt."""
        forwarded = decided.resolution.mode is Mode.WORKER
        return WireConstraint(
            model=decided.model,
            requires_media_refs=forwarded,
            schemes=decided.plan.schemes if forwarded else frozenset(),
            item_counts=prepared.item_counts,
            largest_item_tokens=prepared.largest_item_tokens,
            prompt_tokens=0 if prepared.estimated else prepared.prompt_tokens,
            pixel_format=prepared.pixel_format,
            model_fingerprint=prepared.model_fingerprint,
            roles=decided.roles,
        )

    def pixels_for(self, decided: Decided) -> PixelFormat:
        """How tensors are built for this model: as most of its usable workers want them."""
        takers = [w for w in decided.workers if effective_role(w) in decided.roles]
        usable = [w for w in takers if w.state is WorkerState.READY] or takers or decided.workers
        wanted = Counter(w for w in map(wanted_pixels, usable) if w is not None)
        return wanted.most_common(1)[0][0]

    @asynccontextmanager
    async def _prepared(
        self, request: engine.GenerateRequest, model: str, record: Record
    ) -> AsyncIterator[Ready]:
        with self.dispatcher.tracing.step("plan"):
            decided = self.decide(request, model, record)
        self._tell(decided)
        self._refuse_early(decided)
        async with self._intake.ticket() as ticket:
            prepared = await self.prepare(request, decided, ticket)
            record.prompt_tokens = prepared.prompt_tokens
            may_move = self._settings.migration and migrate.eligible(prepared.body.request)
            ready = Ready(
                prepared,
                self.constraint(decided, prepared),
                ticket,
                pairs=decided.pairs,
                movable=may_move and not decided.pairs,
            )
            # Megabytes hang on these, and a stream may take minutes.
            del decided, prepared
            yield ready

    async def prepare(
        self, request: engine.GenerateRequest, decided: Decided, ticket: Ticket
    ) -> Prepared:
        """Makes the body. What it takes of the media budget is on the ticket."""
        match decided.resolution.mode, decided.plan.tensors:
            case Mode.NONE, False:
                return await self._preparer.text(request, decided.files, decided.context_length)
            case Mode.NONE, True:
                return await self._preparer.client_tensors(
                    request,
                    _known(decided),
                    trust_hashes=self._settings.allow_client_hashes,
                )
            case Mode.WORKER, _:
                return await self._preparer.forward(request, decided.plan, _known(decided))
        return await self._preparer.process(
            request,
            decided.plan,
            _known(decided),
            decided.model_path,
            self.pixels_for(decided),
            ticket,
        )

    def _refuse_early(self, decided: Decided) -> None:
        """No work for a request that nobody can have; without media there is no work."""
        if decided.resolution.mode is Mode.NONE:
            return
        constraint = self.first_constraint(decided)
        if decided.pairs:
            self.pairs.check(constraint)
            return
        seen = self.dispatcher.survey(constraint)
        if not seen.admissible:
            raise self._fault_of(seen)

    def _fault_of(self, seen: Survey) -> Fault:
        return seen.fault(retry_after=self.dispatcher.shed_hint)

    def model_name(self, asked: str) -> str:
        names = self._registry.model_names
        if asked in names:
            return asked
        by_path = {
            w.capability.served_name
            for w in self._registry
            if asked and w.capability and w.capability.model_path == asked
        }
        if len(by_path) == 1:
            return by_path.pop()
        unreadable = sum(w.capability is None for w in self._registry)
        if not names or (asked and unreadable):
            # Nobody has said yet what it serves: that is not the client's fault.
            raise Survey([], unreadable=unreadable).fault(retry_after=1.0)
        if asked:
            raise Fault(
                Reason.MODEL_NOT_FOUND,
                "no worker serves the model that was asked for",
                metadata={"served": str(len(names))},
            )
        if len(names) > 1:
            raise Fault(
                Reason.MODEL_REQUIRED,
                f"{len(names)} models are served; name one in router.model or x-model",
                metadata={"served": str(len(names))},
            )
        return names[0]

    def _tell(self, decided: Decided) -> None:
        resolution = decided.resolution
        if resolution.mode is Mode.NONE:
            return
        self._metrics.mm_processing.labels(
            decided.model, resolution.mode.value, resolution.why.value
        ).inc()
        # One line a change, kept apart for each mixture of modalities.
        key = decided.model, decided.plan.modalities
        if self._told.get(key) != resolution:
            self._told[key] = resolution
            _log.info(
                "mm_processing",
                model=decided.model,
                modalities=sorted(decided.plan.modalities),
                mode=resolution.mode.value,
                reason=resolution.why.value,
            )


class Ready:
    """A prepared request, and what it holds for as long as there may be another attempt."""

    def __init__(
        self,
        prepared: Prepared,
        constraint: WireConstraint,
        ticket: Ticket,
        *,
        pairs: bool,
        movable: bool,
    ) -> None:
        self.constraint = constraint
        self.pairs = pairs
        self.prompt_tokens = prepared.prompt_tokens
        self._body: Body | None = prepared.body
        self._ticket = ticket
        self._continuation = Continuation() if movable else None

    @property
    def body(self) -> Body:
        """What an attempt's bytes are made from."""
        assert self._body is not None, "no attempt is made after the first output"
        return self._body

    def first_output(self) -> None:
        """Lets go of tensors and media budget, unless the stream may move to another worker."""
        if self._continuation is None and self._body is not None:
            self._body.request.Clear()
            self._body = None
            self._ticket.close()

    @property
    def through(self) -> Callable[[bytes], bytes] | None:
        """What each message passes through on its way to the client; None for nothing."""
        return self._keep_and_translate if self._continuation is not None else None

    def move(self, failed: AttemptFailed) -> None:
        """Makes a broken stream's failure one after which another worker goes on, if it can."""
        if self._continuation is None or self._body is None:
            return
        if failed.why.fault.reason is Reason.WORKER_STREAM_BROKEN:
            grown = self._continuation.resume(self._body.request)
            if not self._continuation.exhausted(self._body.request):
                failed.why, failed.grown = movable(failed.why), grown

    def _keep_and_translate(self, message: bytes) -> bytes:
        assert self._continuation is not None
        self._continuation.keep(message)
        return self._continuation.translate(message)


def _view(workers: Sequence[Worker], files: Model | None) -> ModelView:
    spec = files.spec if files else None
    return ModelView(
        worker_expandable=frozenset(spec.worker_expandable) if spec else frozenset(),
        advertised=[w.capability.takes_media_refs for w in workers if w.capability],
        has_encode_workers=any(w.role is Role.ENCODE for w in workers),
    )


def _known(decided: Decided) -> Model:
    if decided.files is None:
        raise Fault(Reason.MULTIMODAL_NOT_SUPPORTED, "this model's files are not known")
    return decided.files
