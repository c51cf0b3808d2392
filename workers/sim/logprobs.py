"""Log probabilities that look like a model's and are the same in every run."""

from __future__ import annotations

from collections.abc import Sequence

from router.wire import engine

# Alternatives are drawn from the byte tokens.
ALPHABET = 256
_MULTIPLIER = 2_654_435_761


def _logprob(token: int, position: int) -> float:
    """Of the chosen token: between -0.5 and 0."""
    mixed = (token * 31 + position * 17 + 7) * _MULTIPLIER & 0xFFFFFFFF
    return -0.5 * (mixed >> 8) / float(1 << 24)


def _alternatives(token: int, position: int, count: int) -> tuple[list[float], list[int]]:
    """The chosen token and `count` - 1 byte tokens below it, in falling order."""
    first = _logprob(token, position)
    values, ids = [first], [token]
    candidate, step = token % ALPHABET, 0
    while len(ids) < min(count, ALPHABET):
        candidate = (candidate + 1) % ALPHABET
        if candidate == token:
            continue
        step += 1
        values.append(first - 1.0 - 0.25 * step)
        ids.append(candidate)
    return values, ids


def of_output(ids: Sequence[int], first_position: int, wanted: int) -> engine.OutputLogProbs:
    """For output tokens from `first_position` on; `wanted` alternatives, -1 for all."""
    count = ALPHABET if wanted < 0 else max(wanted, 1)
    message = engine.OutputLogProbs(token_ids=ids)
    for position, token in enumerate(ids, first_position):
        message.token_logprobs.append(_logprob(token, position))
        values, alternatives = _alternatives(token, position, count)
        message.top_logprobs.add(values=values, token_ids=alternatives)
    return message


def of_prompt(ids: Sequence[int], wanted: int) -> engine.InputLogProbs:
    """For the whole prompt; the first token has no value, since nothing predicts it."""
    count = ALPHABET if wanted < 0 else max(wanted, 1)
    message = engine.InputLogProbs(token_ids=ids)
    for position, token in enumerate(ids):
        entry = message.token_logprobs.add()
        top = message.top_logprobs.add()
        if position == 0:
            continue
        entry.value = _logprob(token, position)
        values, alternatives = _alternatives(token, position, count)
        top.values.extend(values)
        top.token_ids.extend(alternatives)
    return message
