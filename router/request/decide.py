"""The first steps of a request, without any waiting: which model, which media, which mode,
and what a worker must be like. `explain` takes the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from router.faults import Fault, Reason
from router.fleet.model import Model
from router.fleet.registry import Registry
from router.fleet.role import effective_role
from router.fleet.worker import Role, Worker, WorkerState
from router.observe.metrics import UNKNOWN_MODEL
from router.policy.models import Policies
from router.request.constraint import WireConstraint, wanted_pixels
from router.request.interest import Interest, interest
from router.request.pair import is_disaggregated
from router.request.plan import MediaPlan, plan
from router.request.prepared import Prepared
from router.request.record import Record
from router.request.resolve import Mode, ModelView, Resolution, Setting, resolve
from router.request.select import Survey
from router.vision.plan import PixelFormat
from router.wire import engine

# How many served models an error names, in how many characters.
_SHOWN_MODELS = 8
_SHOWN_LENGTH = 200

_OVERRIDES: dict[int, Setting | None] = {
    engine.UNSPECIFIED: None,
    engine.AUTO: "auto",
    engine.ROUTER: "router",
    engine.WORKER: "worker",
}


@dataclass(frozen=True)
class DecideSettings:
    """What the operator set: see the settings of the same names."""

    mm_processing: Setting = "auto"
    allow_mm_override: bool = False
    allow_transfer_params: bool = False


@dataclass(frozen=True)
class Served:
    """A model's workers as they stand, healthy or not, and what follows from that.

    Good for as long as the registry has them so.
    """

    workers: Sequence[Worker]

    @cached_property
    def files(self) -> Model | None:
        """The model's files, None while no worker's were read."""
        return next((w.model for w in self.workers if w.model is not None), None)

    @cached_property
    def view(self) -> ModelView:
        """What the resolution of the mode asks of them."""
        spec = self.files.spec if self.files else None
        return ModelView(
            worker_expandable=frozenset(spec.worker_expandable) if spec else frozenset(),
            advertised=[w.capability.takes_media_refs for w in self.workers if w.capability],
            has_encode_workers=any(w.role is Role.ENCODE for w in self.workers),
        )

    @cached_property
    def pairs(self) -> bool:
        """Whether the model is served by prefill/decode pairs."""
        return is_disaggregated(self.workers)

    @cached_property
    def roles(self) -> frozenset[Role]:
        """The roles of the workers that get the prompt and the media."""
        return frozenset({Role.PREFILL if self.pairs else Role.BOTH})

    @cached_property
    def model_path(self) -> str:
        """The workers' own name for the model's files."""
        return next((w.capability.model_path for w in self.workers if w.capability), "")

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end an answer by themselves, as far as the workers name them."""
        infos = [w.model_info for w in self.workers if w.model_info is not None]
        named = {token for info in infos for token in info.eos_token_ids}
        return frozenset(named | (self.files.end_ids if self.files else frozenset()))

    @cached_property
    def context_length(self) -> int | None:
        """The longest context of the model's workers, in tokens; None while none is known."""
        known = [w.capability.context_length for w in self.workers if w.capability]
        return max((length for length in known if length), default=None)


@dataclass(frozen=True)
class Decided:
    """A request after its first steps: which model, which media, which mode."""

    model: str
    served: Served
    plan: MediaPlan
    resolution: Resolution
    interest: Interest


class Decider:
    """Decides over the workers that are registered at the moment."""

    def __init__(self, registry: Registry, policies: Policies, settings: DecideSettings) -> None:
        self._registry = registry
        self._policies = policies
        self._settings = settings
        self._served: dict[str, Served] = {}

    def decide(self, request: engine.GenerateRequest, model: str, record: Record) -> Decided:
        """Model, plan and mode of a request, noted on its record. Raises `Fault`."""
        media = plan(request, allow_transfer_params=self._settings.allow_transfer_params)
        name = record.model = self.model_name(request.router.model or model)
        served = self._of(name)
        override = _override(request)
        if not self._settings.allow_mm_override:
            record.override_ignored = override is not None and bool(media.items)
            override = None
        resolution = record.resolution = resolve(
            media, served.view, self._settings.mm_processing, override
        )
        wanted = interest(self._policies, name, request.router)
        return Decided(name, served, media, resolution, wanted)

    def _of(self, name: str) -> Served:
        workers = self._registry.of_model(name)
        served = self._served.get(name)
        if served is None or served.workers is not workers:
            # What stood before holds its workers, and the files of their models.
            of_model = self._registry.of_model
            self._served = {n: s for n, s in self._served.items() if s.workers is of_model(n)}
            served = self._served[name] = Served(workers)
        return served

    def first_constraint(self, decided: Decided) -> WireConstraint:
        """What is known of the constraint before any media is fetched."""
        counts = Counter(item.modality for item in decided.plan.items)
        forwarded = decided.resolution.mode is Mode.WORKER
        return WireConstraint(
            model=decided.model,
            requires_media_refs=forwarded,
            schemes=decided.plan.schemes if forwarded else frozenset(),
            item_counts=tuple(sorted(counts.items())),
            roles=decided.served.roles,
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
            roles=decided.served.roles,
        )

    def pixels_for(self, decided: Decided) -> PixelFormat:
        """How tensors are built for this model: as most of its usable workers want them."""
        takers = [w for w in decided.served.workers if effective_role(w) in decided.served.roles]
        usable = (
            [w for w in takers if w.state is WorkerState.READY] or takers or decided.served.workers
        )
        wanted = Counter(w for w in map(wanted_pixels, usable) if w is not None)
        return wanted.most_common(1)[0][0]

    def counted_as(self, asked: str) -> str:
        """The model whose metrics a request belongs to, as far as its name alone tells."""
        names = self._registry.model_names
        if not asked and len(names) == 1:
            return names[0]
        return asked if asked in names else UNKNOWN_MODEL

    def model_name(self, asked: str) -> str:
        """The model that is meant; `asked` is empty where none is named. Raises `Fault`."""
        names = self._registry.model_names
        if asked in names:
            return asked
        if not asked and len(names) == 1:
            return names[0]
        by_path = {
            w.capability.served_name
            for w in self._registry
            if w.capability and w.capability.model_path == asked
        }
        if len(by_path) == 1:
            return by_path.pop()
        unreadable = self._registry.unreadable
        if not names or (asked and unreadable):
            # Nobody has said yet what it serves: that is not the client's fault.
            raise Survey([], unreadable=unreadable).fault(retry_after=1.0)
        if asked:
            raise Fault(
                Reason.MODEL_NOT_FOUND,
                f"no worker serves the model that was asked for; served: {_some(names)}",
                metadata={"served": str(len(names)), "models": _some(names)},
            )
        raise Fault(
            Reason.MODEL_REQUIRED,
            f"several models are served; name one in router.model or x-model: {_some(names)}",
            metadata={"served": str(len(names)), "models": _some(names)},
        )


def _some(names: Sequence[str]) -> str:
    """The first of some sorted names, for an error that must stay short."""
    shown = ", ".join(names[:_SHOWN_MODELS])
    whole = len(names) <= _SHOWN_MODELS and len(shown) <= _SHOWN_LENGTH
    return shown if whole else f"{shown[:_SHOWN_LENGTH]} ..."


def _override(request: engine.GenerateRequest) -> Setting | None:
    """The request's own choice of a mode. Raises `Fault` for one that nobody knows."""
    asked = int(request.router.mm_processing)
    if asked not in _OVERRIDES:
        raise Fault(
            Reason.INVALID_REQUEST, f"router.mm_processing is {asked}, which is no MmProcessing"
        )
    return _OVERRIDES[asked]
