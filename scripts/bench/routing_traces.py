"""Requests to route: generated to published statistics, or read from Mooncake's files.

Block ids stand for content: equal ids, equal prefix, as in Mooncake's traces
(github.com/kvcache-ai/Mooncake, FAST'25), whose ids are of 512 tokens each.
"""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Request:
    """Arrival in seconds, lengths in tokens, ids of the full blocks of the prompt."""

    at: float
    prompt: int
    output: int
    blocks: np.ndarray


@dataclass(frozen=True)
class Trace:
    name: str
    block_size: int
    requests: list[Request]

    def describe(self) -> dict[str, float]:
        """What the trace is like; `ideal_hits` is the share of blocks seen before."""
        prompts = np.array([r.prompt for r in self.requests])
        seen: set[int] = set()
        hits = total = 0
        for request in self.requests:
            ids = request.blocks.tolist()
            total += len(ids)
            for depth, block in enumerate(ids):
                if block not in seen:
                    break
                hits += 1
                del depth
            seen.update(ids)
        return {
            "requests": len(self.requests),
            "seconds": self.requests[-1].at,
            "prompt_mean": float(prompts.mean()),
            "prompt_p50": float(np.percentile(prompts, 50)),
            "prompt_p90": float(np.percentile(prompts, 90)),
            "output_mean": float(np.mean([r.output for r in self.requests])),
            "ideal_hits": hits / max(1, total),
        }


class _Ids:
    """Fresh block ids, spread over 64 bits like hashes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def fresh(self, n: int) -> list[int]:
        return [self._rng.getrandbits(63) | 1 for _ in range(n)]


def conversation(seed: int, *, rate: float, seconds: float) -> Trace:
    """Like Mooncake's conversation trace: sessions, most of a single turn.

    Published: prompts of 12,035 tokens in the mean, 6,909 at p50 and 27,367
    at p90, outputs of 343, 36.6 % of blocks seen before, block 0 in every
    request, about 70 % single turns, 123 s between turns at the median.
    """
    rng = random.Random(seed)
    ids = _Ids(rng)
    system = ids.fresh(1)
    requests: list[Request] = []
    # Turns a session: 1 with 0.7, else 2 or more, 2.75 in the mean.
    sessions = rate / (0.7 + 0.3 * 2.75)
    at = -300.0
    while at < seconds:
        at += rng.expovariate(sessions)
        turns = 1 if rng.random() < 0.7 else 2 + int(rng.expovariate(1 / 1.2))
        size, now = int(rng.lognormvariate(8.55, 1.13)), at
        context: list[int] = list(system)
        for _ in range(turns):
            length = min(max(size, 600), 120_000)
            context += ids.fresh(length // 512 - len(context))
            output = max(1, int(rng.lognormvariate(5.4, 0.93)))
            if 0 <= now < seconds:
                blocks = np.array(context[: length // 512], np.uint64)
                requests.append(Request(now, length, output, blocks))
            size = length + output + int(rng.lognormvariate(7.2, 1.2))
            now += rng.lognormvariate(math.log(123), 1.0)
    requests.sort(key=lambda r: r.at)
    return Trace("conversation", 512, requests)


def synthetic(seed: int, *, rate: float, seconds: float) -> Trace:
    """Like Mooncake's synthetic trace: long documents asked about again and again.

    Published: prompts of 15,325 tokens in the mean, 64 % of blocks seen before.
    """
    rng = random.Random(seed)
    ids = _Ids(rng)
    # The more traffic, the more documents: the reuse of each stays the same.
    documents = [
        ids.fresh(int(min(max(rng.lognormvariate(9.15, 0.7), 1024), 60_000)) // 512)
        for _ in range(max(40, int(rate * 130)))
    ]
    weights = [1 / (1 + i) ** 0.9 for i in range(len(documents))]
    requests, at = [], 0.0
    while at < seconds:
        at += rng.expovariate(rate)
        document = rng.choices(documents, weights)[0]
        own = int(rng.lognormvariate(7.7, 1.0))
        length = len(document) * 512 + own
        blocks = np.array(document + ids.fresh(own // 512), np.uint64)
        output = max(1, int(rng.lognormvariate(4.7, 0.8)))
        requests.append(Request(at, length, output, blocks))
    return Trace("synthetic", 512, requests)


def multimodal(seed: int, *, rate: float, seconds: float) -> Trace:
    """Four 720p images (about 3.5k tokens) and a question; half of the image sets come again."""
    rng = random.Random(seed)
    ids = _Ids(rng)
    system = ids.fresh(2)
    recent: OrderedDict[int, list[int]] = OrderedDict()
    requests, at = [], 0.0
    while at < seconds:
        at += rng.expovariate(rate)
        if recent and rng.random() < 0.5:
            images = recent[rng.choice(list(recent)[-int(60 * rate) :])]
        else:
            images = ids.fresh(4 * 880 // 64)
            recent[len(recent)] = images
        question = rng.randint(30, 300)
        length = 64 * (len(system) + len(images)) + question
        blocks = np.array(system + images + ids.fresh(question // 64), np.uint64)
        requests.append(Request(at, length, max(1, int(rng.lognormvariate(4.8, 0.7))), blocks))
    return Trace("multimodal", 64, requests)


def mooncake(path: Path) -> Trace:
    """A file of Mooncake's: JSON lines of timestamp (ms), lengths and hash_ids."""
    requests = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        # Their small numbers as keys: spread them, 0 is no key.
        blocks = np.array(entry["hash_ids"], np.uint64) + np.uint64(1)
        blocks *= np.uint64(0x9E3779B97F4A7C15)
        prompt = entry["input_length"]
        full = blocks[: prompt // 512]
        requests.append(Request(entry["timestamp"] / 1000, prompt, entry["output_length"], full))
    requests.sort(key=lambda r: r.at)
    return Trace(path.stem, 512, requests)


if __name__ == "__main__":
    for trace in (
        conversation(1, rate=3.4, seconds=3540),
        synthetic(1, rate=3.9, seconds=1020),
        multimodal(1, rate=12, seconds=300),
    ):
        print(trace.name, {k: round(v, 3) for k, v in trace.describe().items()})
