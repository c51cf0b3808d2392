"""Sampling parameters as the worker takes them, checked."""

from __future__ import annotations

import random
from dataclasses import dataclass

from router.wire import engine
from workers.sim.output import StopRules
from workers.sim.refused import invalid

MOST_CHOICES = 128


@dataclass(frozen=True)
class Sampling:
    """What one request asks of the generation, apart from its constraint."""

    rules: StopRules
    choices: int
    # None is greedy.
    seed: int | None
    greedy: bool
    logprobs: int | None
    prompt_logprobs: int | None

    def draw(self, index: int) -> random.Random | None:
        """The source of chance for choice `index`; None when decoding is greedy."""
        if self.greedy:
            return None
        # Unseeded requests differ from each other, seeded ones repeat.
        return random.Random(None if self.seed is None else f"{self.seed}/{index}")


def read(params: engine.SamplingParams, prompt_tokens: int, max_context: int) -> Sampling:
    """Refused with INVALID_ARGUMENT for values that mean nothing."""
    room = max_context - prompt_tokens
    wanted = params.max_tokens if params.HasField("max_tokens") else room
    if wanted < 1:
        raise invalid("max_tokens must be at least 1")
    if params.min_tokens > wanted:
        raise invalid(f"min_tokens {params.min_tokens} is more than max_tokens {wanted}")
    if params.n > MOST_CHOICES:
        raise invalid(f"n must be at most {MOST_CHOICES}, not {params.n}")
    temperature = params.temperature if params.HasField("temperature") else 0.0
    if temperature < 0:
        raise invalid(f"temperature cannot be negative: {temperature:g}")
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name) and getattr(params, name) < -1:
            raise invalid(f"{name} must be -1 or more, not {getattr(params, name)}")
    return Sampling(
        rules=StopRules(
            max_tokens=min(wanted, room),
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            stop_token_ids=frozenset(params.stop_token_ids),
            stop=tuple(params.stop),
            skip_special_tokens=params.skip_special_tokens,
        ),
        choices=max(params.n, 1),
        seed=params.seed if params.HasField("seed") else None,
        greedy=temperature == 0,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )
