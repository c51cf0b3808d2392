"""What the model says: a sentence that proves what has reached it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from workers.sim.picture import Sight
from workers.sim.tokenizer import IM_START, plain_bytes

LAST_WORDS = 6

_OPENINGS = (
    "I read",
    "I have read",
    "What reached me is",
    "Here I count",
    "Let me see:",
    "So this is",
    "You sent me",
    "In front of me are",
)


@dataclass(frozen=True)
class Seen:
    """One item of the prompt. `fitting` of `features` found a placeholder token."""

    sight: Sight
    features: int
    fitting: int


def compose(
    ids: npt.NDArray[np.uint32], seen: Sequence[Seen], *, draw: random.Random | None
) -> str:
    """The answer to the expanded prompt `ids` (uint32 [n]).

    Without `draw` (greedy decoding) it depends on what arrived alone, so the
    same picture gives the same answer by whatever way it came. With it, the
    words vary.
    """
    opening = _OPENINGS[0] if draw is None else draw.choice(_OPENINGS)
    sentences = [f"{opening} {_count(len(ids), 'prompt token')}{_and_media(seen)}."]
    numbers: dict[str, int] = {}
    for item in seen:
        modality = item.sight.modality
        numbers[modality] = numbers.get(modality, 0) + 1
        sentences.append(item.sight.describe(numbers[modality]))
        if item.fitting < item.features:
            sentences.append(f"Only {item.fitting} of its {item.features} features had a place.")
    digest = blake3(np.ascontiguousarray(ids, dtype="<u4").tobytes()).hexdigest()[:8]
    words = last_words(ids)
    sentences.append(
        f'The prompt is {digest} and ends "{words}".' if words else f"The prompt is {digest}."
    )
    if draw is not None:
        sentences.append(f"I feel like {draw.randrange(1_000_000)}.")
    return " ".join(sentences)


def last_words(ids: npt.NDArray[np.uint32]) -> str:
    """The last few words of the last text between special tokens that says anything.

    A text right behind <|im_start|> begins with the line that names the role;
    that line is not part of what was said.
    """
    bounds = np.concatenate([[-1], np.flatnonzero(ids >= 256), [len(ids)]])
    for at in np.flatnonzero(np.diff(bounds) > 1)[::-1]:
        start, end = int(bounds[at]), int(bounds[at + 1])
        # Long texts: the end is enough.
        raw = plain_bytes(ids[max(start + 1, end - 512) : end])
        if start >= 0 and ids[start] == IM_START and end - start <= 512:
            raw = raw.partition(b"\n")[2]
        words = raw.decode(errors="replace").split()
        if words:
            return " ".join(words[-LAST_WORDS:])[-80:]
    return ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _and_media(seen: Sequence[Seen]) -> str:
    parts = []
    for modality in ("image", "video"):
        number = sum(item.sight.modality == modality for item in seen)
        if number:
            parts.append(_count(number, modality))
    return "".join(f" and {part}" for part in parts)
