"""Why no worker takes what a request is made of, in words and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from router.faults import Fault, Reason
from router.fleet.capability import Capability
from router.fleet.worker import Worker
from router.request.constraint import Cause, WireConstraint


def incapable(
    cause: Cause,
    constraint: WireConstraint,
    workers: Sequence[Worker],
    counts: Mapping[str, str],
) -> Fault:
    """The fault for `workers` that are free and all refuse the constraint for `cause`.

    `counts` (workers by cause) go into the metadata, and with them what was
    asked for and the most that any of the workers takes.
    """
    capabilities = [w.capability for w in workers if w.capability is not None]
    reason, message, about = _explained(cause, constraint, capabilities)
    return Fault(
        reason, message, metadata={**counts, **{key: str(value) for key, value in about.items()}}
    )


def _explained(
    cause: Cause, constraint: WireConstraint, capabilities: Sequence[Capability]
) -> tuple[Reason, str, Mapping[str, object]]:
    match cause:
        case Cause.NO_MEDIA_PROCESSOR:
            return (
                Reason.NO_MEDIA_REF_CAPABLE_WORKER,
                "no worker of this model takes media references",
                {},
            )
        case Cause.SCHEME_NOT_ACCEPTED:
            used = ",".join(sorted(constraint.schemes))
            accepted = ",".join(sorted(set[str]().union(*(c.schemes for c in capabilities))))
            return (
                Reason.MEDIA_REF_SCHEME_NOT_ACCEPTED,
                f"the request has URLs of the schemes {used}, and no worker of this model "
                "fetches all of them",
                {"schemes": used, "accepted": accepted},
            )
        case Cause.ITEM_LIMIT:
            return _over_item_limit(constraint, capabilities)
        case Cause.ENCODER_BUDGET:
            tokens = constraint.largest_item_tokens
            limit = _most(c.encoder_budget for c in capabilities)
            return (
                Reason.MEDIA_ITEM_OVER_ENCODER_BUDGET,
                f"a media item has {tokens} feature tokens; an encoder of this model takes at "
                f"most {limit} for one item",
                {"tokens": tokens, "limit": limit},
            )
        case Cause.CONTEXT_LENGTH:
            tokens = constraint.prompt_tokens
            limit = _most(c.context_length for c in capabilities)
            return (
                Reason.PROMPT_TOO_LONG,
                f"the prompt with its media has {tokens} tokens; with one to generate that is "
                f"over the model's context of {limit}",
                {"tokens": tokens, "limit": limit},
            )
        case Cause.PIXEL_FORMAT if constraint.model_fingerprint is None:
            # The router would have made others: these are the client's own tensors.
            return (
                Reason.MALFORMED_TENSORS,
                "mm_inputs: no worker of this model takes pixels of this dtype and normalise rule",
                {"check": "normalize"},
            )
    return Reason.NO_AVAILABLE_WORKER, "no worker takes the request as it was prepared", {}


def _over_item_limit(
    constraint: WireConstraint, capabilities: Sequence[Capability]
) -> tuple[Reason, str, Mapping[str, object]]:
    """Names the first modality of which no worker takes so many items."""
    widest = {
        modality: _most(c.item_limits.get(modality) for c in capabilities)
        for modality, _ in constraint.item_counts
    }
    modality, items = next(
        ((m, n) for m, n in constraint.item_counts if 0 < widest[m] < n),
        constraint.item_counts[0],
    )
    return (
        Reason.TOO_MANY_MEDIA_ITEMS,
        f"the request has {items} {modality} items; a worker of this model takes at most "
        f"{widest[modality]} in one prompt",
        {"modality": modality, "items": items, "limit": widest[modality]},
    )


def _most(limits: Iterable[int | None]) -> int:
    return max((limit for limit in limits if limit), default=0)
