"""What a worker must satisfy for the bytes that were built.

Built once, from the prepared request, and asked everywhere: the first
selection, each retry, each leg of a pair, and `explain`. Nothing else in the
router filters workers by capability or scheme.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from router.fleet.role import effective_role
from router.fleet.worker import Role, Worker
from router.vision.plan import PixelFormat


class Cause(Enum):
    """Why a worker is not admitted, in the order in which it is asked."""

    METADATA_UNKNOWN = "metadata_unknown"
    OTHER_MODEL = "other_model"
    OTHER_ROLE = "other_role"
    NO_MEDIA_PROCESSOR = "no_media_processor"
    SCHEME_NOT_ACCEPTED = "scheme_not_accepted"
    OTHER_MODEL_FILES = "other_model_files"
    PIXEL_FORMAT = "pixel_format"
    ITEM_LIMIT = "item_limit"
    ENCODER_BUDGET = "encoder_budget"
    CONTEXT_LENGTH = "context_length"


_ORDER = {cause: position for position, cause in enumerate(Cause)}


def nearest_to_admission(causes: list[Cause]) -> Cause:
    """The cause that the most suitable of the refusing workers had."""
    return max(causes, key=_ORDER.__getitem__)


@dataclass(frozen=True)
class WireConstraint:
    """`item_counts` holds (modality, items) pairs. `largest_item_tokens` is in feature
    tokens. `prompt_tokens` is the expanded length, 0 while unknown; one output
    token is added to it. `pixel_format` and `model_fingerprint` are set when
    tensors were built: by which rule, and from which model files.
    """

    model: str
    requires_media_refs: bool = False
    schemes: frozenset[str] = frozenset()
    item_counts: tuple[tuple[str, int], ...] = ()
    largest_item_tokens: int = 0
    prompt_tokens: int = 0
    pixel_format: PixelFormat | None = None
    model_fingerprint: str | None = None
    roles: frozenset[Role] = frozenset({Role.BOTH})

    def admits(self, worker: Worker) -> Cause | None:
        """None when the worker can serve these bytes, else the first thing in the way."""
        capability = worker.capability
        if capability is None:
            return Cause.METADATA_UNKNOWN
        if capability.served_name != self.model:
            return Cause.OTHER_MODEL
        if effective_role(worker) not in self.roles:
            return Cause.OTHER_ROLE
        if self.requires_media_refs:
            if not capability.takes_media_refs:
                return Cause.NO_MEDIA_PROCESSOR
            # A worker that names no schemes has no limit on them.
            if capability.schemes and not self.schemes <= capability.schemes:
                return Cause.SCHEME_NOT_ACCEPTED
        if self.model_fingerprint is not None and (
            worker.model is None or worker.model.fingerprint != self.model_fingerprint
        ):
            return Cause.OTHER_MODEL_FILES
        if self.pixel_format is not None and not takes_pixels(worker, self.pixel_format):
            return Cause.PIXEL_FORMAT
        for modality, count in self.item_counts:
            if count > capability.item_limits.get(modality, count):
                return Cause.ITEM_LIMIT
        if capability.encoder_budget and self.largest_item_tokens > capability.encoder_budget:
            return Cause.ENCODER_BUDGET
        if (
            capability.context_length
            and self.prompt_tokens
            and self.prompt_tokens + 1 > capability.context_length
        ):
            return Cause.CONTEXT_LENGTH
        return None

    def lines(self) -> list[str]:
        """The constraint for people, a line each."""
        lines = [f"model = {self.model}", f"role in {sorted(r.value for r in self.roles)}"]
        if self.requires_media_refs:
            lines.append(f"takes media references with schemes {sorted(self.schemes)}")
        if self.pixel_format is not None:
            kind = "normalised" if self.pixel_format.normalized else "raw"
            lines.append(f"takes {kind} {self.pixel_format.dtype} pixels")
        if self.model_fingerprint is not None:
            lines.append(f"has the model files {self.model_fingerprint[:12]}")
        lines += [f"takes {count} {modality} items" for modality, count in self.item_counts]
        if self.largest_item_tokens:
            lines.append(f"encoder takes {self.largest_item_tokens} tokens for one item")
        if self.prompt_tokens:
            lines.append(f"context holds {self.prompt_tokens} + 1 tokens")
        return lines


def wanted_pixels(worker: Worker) -> PixelFormat | None:
    """How a worker wants router-made pixels; None while its capability is unknown.

    A worker that normalises on its device takes raw bytes; any other takes
    normalised values in its encoder's dtype (float32 when it names none).
    """
    capability = worker.capability
    if capability is None:
        return None
    if capability.device_normalize:
        return PixelFormat("uint8", normalized=False)
    dtype = capability.encoder_dtype or capability.model_dtype
    if dtype == "bfloat16":
        return PixelFormat("bfloat16", normalized=True)
    if dtype == "float16":
        return PixelFormat("float16", normalized=True)
    return PixelFormat("float32", normalized=True)


def takes_pixels(worker: Worker, pixels: PixelFormat) -> bool:
    """Whether tensors built as `pixels` mean the same thing to this worker.

    The normalise rule decides: pixels of the other rule give wrong answers
    without an error. A worker casts floats to its encoder's dtype by itself,
    so only tensors of a narrower dtype than it wants are refused.
    """
    wanted = wanted_pixels(worker)
    if wanted is None or wanted.normalized != pixels.normalized:
        return False
    return not pixels.normalized or pixels.dtype in (wanted.dtype, "float32")
