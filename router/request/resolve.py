"""Where a request's media become tensors, decided before a worker is chosen.

The decision looks at all registered workers of the model, healthy or not, so
that a worker's ill health does not switch the mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from router.faults import Fault, Reason
from router.request.plan import MediaPlan, Part

Setting = Literal["auto", "router", "worker"]


class Mode(Enum):
    # No references: text, or tensors that the client made.
    NONE = "none"
    ROUTER = "router"
    WORKER = "worker"


class Why(Enum):
    """The reason of a resolution, as metrics, logs and `explain` show it."""

    NO_MEDIA = "no_media"
    CLIENT_TENSORS = "client_tensors"
    CONFIG = "config"
    OVERRIDE = "override"
    PLAN_NOT_FORWARDABLE = "plan_not_forwardable"
    MODEL_NOT_OPTED_IN = "model_not_opted_in"
    EPD_UNSUPPORTED = "epd_unsupported"
    AUTO_NONE = "auto_none"
    AUTO_MIXED = "auto_mixed"
    AUTO_UNIFORM = "auto_uniform"


@dataclass(frozen=True)
class Resolution:
    mode: Mode
    why: Why


@dataclass(frozen=True)
class ModelView:
    """What the decision may know of a model.

    `worker_expandable` holds the modalities whose anchor a worker's own
    processor expands; `advertised` says of each registered worker whether it
    takes references; `has_encode_workers` is true for fleets with workers
    that do nothing but encode.
    """

    worker_expandable: frozenset[str]
    advertised: Sequence[bool]
    has_encode_workers: bool = False


_CLIENT_TENSORS = Resolution(Mode.NONE, Why.CLIENT_TENSORS)
_NO_MEDIA = Resolution(Mode.NONE, Why.NO_MEDIA)


def resolve(
    plan: MediaPlan, model: ModelView, setting: Setting, override: Setting | None = None
) -> Resolution:
    """Raises `Fault` where workers are demanded and an item cannot be forwarded."""
    if plan.tensors:
        return _CLIENT_TENSORS
    if not plan.items:
        return _NO_MEDIA
    wanted = override or setting
    forced = Why.OVERRIDE if override else Why.CONFIG
    if wanted == "router":
        return Resolution(Mode.ROUTER, forced)
    if wanted == "worker":
        _refuse_unforwardable(plan, model)
        return Resolution(Mode.WORKER, forced)
    return _automatic(plan, model)


def _automatic(plan: MediaPlan, model: ModelView) -> Resolution:
    if plan.blocked:
        return Resolution(Mode.ROUTER, Why.PLAN_NOT_FORWARDABLE)
    if not model.worker_expandable:
        return Resolution(Mode.ROUTER, Why.MODEL_NOT_OPTED_IN)
    if not plan.modalities <= model.worker_expandable:
        return Resolution(Mode.ROUTER, Why.PLAN_NOT_FORWARDABLE)
    if model.has_encode_workers:
        return Resolution(Mode.ROUTER, Why.EPD_UNSUPPORTED)
    if not any(model.advertised):
        return Resolution(Mode.ROUTER, Why.AUTO_NONE)
    if not all(model.advertised):
        return Resolution(Mode.ROUTER, Why.AUTO_MIXED)
    return Resolution(Mode.WORKER, Why.AUTO_UNIFORM)


def _refuse_unforwardable(plan: MediaPlan, model: ModelView) -> None:
    if plan.blocked:
        item, part = plan.blocked
        hint = part in (Part.HINT_MAX_LONG_SIDE, Part.HINT_FPS)
        raise Fault.of_item(
            Reason.MULTIMODAL_HINT_UNSUPPORTED_IN_WORKER_MODE
            if hint
            else Reason.MULTIMODAL_UNSUPPORTED_PART,
            item.index,
            f"{part.value} cannot be forwarded to a worker",
            part=part.value,
        )
    if not model.worker_expandable:
        raise Fault(
            Reason.MULTIMODAL_WORKER_PROCESSING_UNSUPPORTED_MODEL,
            "this model's media cannot be processed by workers",
        )
    for item in plan.items:
        if item.modality not in model.worker_expandable:
            raise Fault.of_item(
                Reason.MULTIMODAL_UNSUPPORTED_PART,
                item.index,
                f"{item.modality} of this model cannot be processed by workers",
                part=item.modality,
            )
