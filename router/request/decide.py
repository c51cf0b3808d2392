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
class Decided:
    """A request after its first steps: which model, which media, which mode."""

    model: str
    workers: Sequence[Worker]
    files: Model | None
    plan: MediaPlan
    resolution: Resolution
    interest: Interest

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


class Decider:
    """Decides over the workers that are registered at the moment."""

    def __init__(self, registry: Registry, policies: Policies, settings: DecideSettings) -> None:
        self._registry = registry
        self._policies = policies
        self._settings = settings

    def decide(self, request: engine.GenerateRequest, model: str, record: Record) -> Decided:
        """Model, plan and mode of a request, noted on its record. Raises `Fault`."""
        media = plan(request, allow_transfer_params=self._settings.allow_transfer_params)
        name = record.model = self.model_name(request.router.model or model)
        workers = self._registry.of_model(name)
        files = next((w.model for w in workers if w.model is not None), None)
        override = _override(request)
        if not self._settings.allow_mm_override:
            record.override_ignored = override is not None and bool(media.items)
            override = None
        resolution = record.resolution = resolve(
            media, _view(workers, files), self._settings.mm_processing, override
        )
        wanted = interest(self._policies, name, request.router)
        return Decided(name, workers, files, media, resolution, wanted)

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

    def model_name(self, asked: str) -> str:
        """The model that is meant; `asked` is empty where none is named. Raises `Fault`."""
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
                f"no worker serves the model that was asked for; served: {_some(names)}",
                metadata={"served": str(len(names)), "models": _some(names)},
            )
        if len(names) > 1:
            raise Fault(
                Reason.MODEL_REQUIRED,
                f"several models are served; name one in router.model or x-model: {_some(names)}",
                metadata={"served": str(len(names)), "models": _some(names)},
            )
        return names[0]


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


def _view(workers: Sequence[Worker], files: Model | None) -> ModelView:
    spec = files.spec if files else None
    return ModelView(
        worker_expandable=frozenset(spec.worker_expandable) if spec else frozenset(),
        advertised=[w.capability.takes_media_refs for w in workers if w.capability],
        has_encode_workers=any(w.role is Role.ENCODE for w in workers),
    )
