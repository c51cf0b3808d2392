"""What the choice of a worker will ask of a request, so that nothing else is found out.

The one place that every step asks before it works for routing alone: block
keys, tokens of a text, names and sizes of media that are not fetched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.faults import Fault, Reason
from router.policy.models import Policies
from router.wire import engine


@dataclass(frozen=True)
class Interest:
    """`prefixes`: what workers have cached of the prompt counts. `lengths`: how long it is
    once media are expanded counts. `prefix_credit` is the request's own word.
    """

    prefixes: bool = False
    lengths: bool = False
    prefix_credit: float | None = None


def interest(policies: Policies, model: str, options: engine.RouterOptions) -> Interest:
    """By the settings in effect for this request of the model. Raises `Fault` INVALID_REQUEST."""
    credit = options.prefix_credit if options.HasField("prefix_credit") else None
    if credit is not None and not (math.isfinite(credit) and credit >= 0):
        raise Fault(
            Reason.INVALID_REQUEST, "router.prefix_credit must be a number that is not negative"
        )
    return Interest(
        policies.uses_prefix_overlap(model, prefix_credit=credit),
        policies.uses_prompt_length(model, prefix_credit=credit),
        credit,
    )
