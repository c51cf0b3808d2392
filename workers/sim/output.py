"""The ids of one choice, from the sentence the model would say to the last token it may say."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, chain, cycle, islice
from typing import Literal

from workers.sim.tokenizer import EOS_IDS, IM_END, token_bytes

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class StopRules:
    """When generation ends; `max_tokens` is already within the context."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class Output:
    """All ids of one choice; those that ended it are the last of them."""

    ids: list[int]
    finish_reason: FinishReason
    matched_token: int | None = None
    matched_string: str | None = None


def write(sentence: str, rules: StopRules) -> Output:
    """What comes out when the model says `sentence` over and over.

    It says it once and then <|im_end|>, which ends the output. With
    `ignore_eos` it goes on from there; before `min_tokens` no end token is
    drawn at all, as in a real engine, so the next round begins at once.
    """
    said = sentence.encode()
    wanted = rules.max_tokens
    if rules.ignore_eos:
        ids = list(islice(cycle([*said, IM_END]), wanted))
    elif len(said) >= rules.min_tokens:
        ids = [*said, IM_END][:wanted]
    else:
        spoken = islice(cycle(said + b" "), min(rules.min_tokens, wanted))
        ids = list(islice(chain(spoken, (IM_END,)), wanted))
    return _end(ids, rules)


def drift(rules: StopRules) -> Output:
    """What comes out of a model that has lost its positions: line breaks up to the limit."""
    return Output([ord("\n")] * rules.max_tokens, "length")


def _end(ids: list[int], rules: StopRules) -> Output:
    """Cuts `ids` behind the first token that ends them."""
    at_token = _first_stop_token(ids, rules)
    at_string, string = _first_stop_string(ids, rules)
    if at_token is not None and (at_string is None or at_token <= at_string):
        token = ids[at_token]
        # The end-of-sequence token is a plain stop; only asked-for ids are reported.
        matched = token if token in rules.stop_token_ids else None
        return Output(ids[: at_token + 1], "stop", matched_token=matched)
    if at_string is not None:
        return Output(ids[: at_string + 1], "stop", matched_string=string)
    return Output(ids, "length")


def _first_stop_token(ids: list[int], rules: StopRules) -> int | None:
    ending = set(rules.stop_token_ids)
    if not rules.ignore_eos:
        ending.update(EOS_IDS)
    if not ending:
        return None
    start = max(rules.min_tokens - 1, 0)
    return next((at for at in range(start, len(ids)) if ids[at] in ending), None)


def _first_stop_string(ids: list[int], rules: StopRules) -> tuple[int | None, str | None]:
    """The index of the token that completes a stop string first, and that string."""
    if not rules.stop:
        return None, None
    pieces = [token_bytes(i, special=not rules.skip_special_tokens) for i in ids]
    text = b"".join(pieces)
    ends = list(accumulate(len(piece) for piece in pieces))
    # Text of the first min_tokens - 1 tokens ends nothing, but a match may begin in it.
    exempt = ends[min(rules.min_tokens, len(ends)) - 2] if rules.min_tokens > 1 else 0
    best: tuple[int, str] | None = None
    for stop in rules.stop:
        needle = stop.encode()
        found = text.find(needle, max(0, exempt - len(needle) + 1)) if needle else -1
        if found < 0:
            continue
        end = found + len(needle)
        if best is None or end < best[0]:
            best = (end, stop)
    if best is None:
        return None, None
    return bisect_left(ends, best[0]), best[1]
