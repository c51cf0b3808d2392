"""What it costs to send a prompt to each of several workers.

The published form of the prefix cost (NVIDIA Dynamo's router) counts blocks:
`scale * max(0, (active prefill tokens + prompt) / block - credit * matched) +
decode blocks`. It does not know how fast a worker is, nor what others queued
there. This one counts the same things in seconds, each worker's tokens at its
own measured rate, so that its terms can be compared with each other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Weights:
    """See `PolicySettings`, where each is described."""

    credit: float
    prefill: float
    wait: float
    crowd: float
    spill_wait: float


def seconds(
    prompt_tokens: int,
    matched_tokens: Floats,
    waits: Floats,
    rates: Floats,
    context_tokens: Floats,
    weights: Weights,
) -> Floats:
    """Weighted seconds until the first output at each worker; all arrays are [workers].

    `matched_tokens` are weighted by tier, `waits` are in seconds, `rates` in
    prompt tokens per second. A worker that is behind the least busy one by
    more than `spill_wait` gets no credit for what it has.
    """
    near = waits <= waits.min() + weights.spill_wait
    saved = np.where(near, weights.credit * matched_tokens, 0.0)
    own = np.maximum(0.0, prompt_tokens - saved) / rates
    crowd = context_tokens / rates
    total: Floats = weights.wait * waits + weights.prefill * own + weights.crowd * crowd
    return total


def lowest(costs: Floats, temperature: float, rng: random.Random) -> int:
    """The position of the lowest cost, or one drawn by softmin; equals at random.

    With a temperature T the chances are exp(-cost / ((max - min) * T)).
    """
    low, high = float(costs.min()), float(costs[np.isfinite(costs)].max())
    if temperature <= 0 or high <= low:
        return int(rng.choice(np.flatnonzero(costs == low).tolist()))
    chances = np.exp((low - costs) / ((high - low) * temperature))
    return rng.choices(range(len(costs)), weights=chances.tolist())[0]
