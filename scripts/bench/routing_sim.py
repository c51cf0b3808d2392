"""Compares ways to route over a simulated fleet with prefix caches.

    python scripts/bench/routing_sim.py [--workers 8 64] [--seeds 1] [--minutes 5]
        [--mooncake FILE ...] [--plots docs/images] [--only TRACE ...]

The policies, the index, the expectations and the measuring of rates are the
router's own; the workers and the network are simulated, event by event. One
of the workers runs at half speed, and nobody tells the policies.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from routing_baselines import LongestPrefix, PublishedCost
from routing_traces import Request, Trace, conversation, mooncake, multimodal, synthetic

from router.fleet.pressure import Backlog, Place
from router.policy.base import Policy, RoutingView
from router.policy.least_load import LeastLoad, PowerOfTwo
from router.policy.prefix import ORDINARY_RATE, Prefix
from router.policy.round_robin import RoundRobin
from router.policy.settings import PolicySettings
from router.prefix.changes import Removed
from router.prefix.index import IndexSettings, PrefixIndex
from router.prefix.resident import Resident

EVENT_DELAY = 0.05
REPORT_INTERVAL = 1.0


@dataclass(frozen=True)
class Engine:
    """A worker's abilities: tokens/s of prefill, seconds a decode step, cache in tokens."""

    prefill_rate: float = 7000.0
    prefill_overhead: float = 0.03
    decode_step: float = 0.02
    cache_tokens: int = 1_500_000
    slots: int = 256


@dataclass(eq=False)
class Seen:
    """A worker as one router knows it."""

    address: str
    worker: SimWorker
    resident: Resident
    backlog: Backlog
    generation: int = 1

    @property
    def expected_wait(self) -> float:
        return self.backlog.pressure().wait(ORDINARY_RATE)


@dataclass
class Job:
    request: Request
    place: Place
    keys: list[int]
    uncached: int = 0


class Clock:
    """Simulated seconds, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), then))

    def run(self) -> None:
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()


@dataclass(eq=False)
class SimWorker:
    """Prompts one after another, decodes beside them, an LRU cache of blocks."""

    address: str
    engine: Engine
    speed: float
    clock: Clock
    block_size: int
    reporting: bool
    # Seconds between which it gives no output.
    stall: tuple[float, float] = (math.inf, math.inf)
    times: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # One for each router.
        self.seen: list[Seen] = []
        self.queue: deque[Job] = deque()
        self.prefilling: Job | None = None
        self.running = 0
        self.busy = 0.0
        self.hit_blocks = self.all_blocks = 0
        self.capacity = self.engine.cache_tokens // self.block_size
        # Blocks nobody uses now, least recently used first; and the users of the others.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._users: Counter[int] = Counter()
        self._news: list[tuple[np.ndarray, int]] = []
        self._gone: list[int] = []
        self._telling = False

    def seen_by(self, index: PrefixIndex) -> Seen:
        """This worker in the eyes of one more router."""
        resident = Resident(index, self.block_size)
        resident.reporting = self.reporting
        backlog = Backlog(self.clock)
        backlog.slots = self.engine.slots
        self.seen.append(Seen(self.address, self, resident, backlog))
        return self.seen[-1]

    def take(self, request: Request, place: Place) -> None:
        """A router sent a request."""
        self.queue.append(Job(request, place, request.blocks.tolist()))
        self._begin()

    def _begin(self) -> None:
        if self.prefilling or not self.queue or self.running >= self.engine.slots:
            return
        job = self.queue[0]
        if len(self._users) + len(job.keys) > self.capacity and self.running:
            return
        self.queue.popleft()
        self.prefilling = job
        cached = 0
        for key in job.keys:
            if key not in self._users and key not in self._idle:
                break
            cached += 1
        self.hit_blocks += cached
        self.all_blocks += len(job.keys)
        for key in job.keys[:cached]:
            self._use(key)
        job.uncached = max(1, job.request.prompt - cached * self.block_size)
        # Decodes take their part of each step.
        share = 1 - 0.5 * self.running / self.engine.slots
        rate = self.engine.prefill_rate * self.speed * share
        spent = self.engine.prefill_overhead / self.speed + job.uncached / rate
        self.busy += spent
        now = self.clock.now
        if now < self.stall[1] and now + spent > self.stall[0]:
            spent += self.stall[1] - max(now, self.stall[0])
        self.clock.after(spent, lambda: self._first_output(job, cached))

    def _first_output(self, job: Job, cached: int) -> None:
        fresh = [key for key in job.keys[cached:] if key not in self._users]
        for key in job.keys[cached:]:
            self._use(key)
        if fresh:
            parent = job.keys[cached - 1] if cached else 0
            self._news.append((job.request.blocks[cached:], parent))
        while len(self._users) + len(self._idle) > self.capacity and self._idle:
            self._gone.append(self._idle.popitem(last=False)[0])
        self._tell()
        self.prefilling = None
        self.running += 1
        job.place.first_output()
        now = self.clock.now
        self.times.append((job.request.at, now - job.request.at))
        step = self.engine.decode_step / self.speed * (1 + self.running / 64)
        self.clock.after(step * job.request.output, lambda: self._end(job))
        self._begin()

    def _end(self, job: Job) -> None:
        self.running -= 1
        job.place.finish()
        for key in reversed(job.keys):
            self._users[key] -= 1
            if self._users[key] == 0:
                del self._users[key]
                self._idle[key] = None
        self._begin()

    def _use(self, key: int) -> None:
        self._users[key] += 1
        self._idle.pop(key, None)

    def report(self) -> None:
        """What the engine says about itself every second."""
        begin, end = self.stall
        silence = self.clock.now - begin if begin < self.clock.now < end else 0.0
        pending = self._uncached_pending()
        for seen in self.seen:
            seen.backlog.reported(pending, silence)

    def _uncached_pending(self) -> int:
        total = self.prefilling.uncached if self.prefilling else 0
        for job in self.queue:
            cached = 0
            for key in job.keys:
                if key not in self._users and key not in self._idle:
                    break
                cached += 1
            total += job.request.prompt - cached * self.block_size
        return total

    def _tell(self) -> None:
        if not self._telling and (self._news or self._gone):
            self._telling = True
            self.clock.after(EVENT_DELAY, self._deliver)

    def _deliver(self) -> None:
        self._telling = False
        news, gone = self._news, np.array(self._gone, np.uint64).view(np.int64)
        self._news, self._gone = [], []
        if not self.reporting:
            return
        for seen in self.seen:
            holder, index = seen.resident.holders[0], seen.resident.index
            for blocks, parent in news:
                index.store_keys(holder, blocks.view(np.int64), blocks, parent)
            index.apply(holder, Removed(gone))


class TraceBlocks:
    """A trace's block ids as keys."""

    exact = True

    def __init__(self, request: Request) -> None:
        self._blocks = request.blocks

    def keys(self, block_size: int) -> np.ndarray:
        return self._blocks


@dataclass(frozen=True)
class Result:
    mean: float
    p99: float
    hits: float
    imbalance: float
    rate: float


Maker = Callable[[Trace, random.Random], Policy]


def _prefix(kind: type[Prefix], **weights: float) -> Maker:
    def make(trace: Trace, rng: random.Random) -> Policy:
        settings = PolicySettings(policy="prefix", **weights)  # type: ignore[arg-type]
        extra = {"block_size": trace.block_size} if kind is PublishedCost else {}
        return kind(settings, lambda w: w.resident, lambda w: w.backlog.pressure(), rng, **extra)

    return make


POLICIES: dict[str, Maker] = {
    "round robin": lambda trace, rng: RoundRobin(),
    "power of two": lambda trace, rng: PowerOfTwo(rng),
    "least load": lambda trace, rng: LeastLoad(rng),
    "longest prefix": _prefix(LongestPrefix),
    "published cost": _prefix(PublishedCost),
    "prefix (ours)": _prefix(Prefix),
}


def simulate(
    trace: Trace,
    make: Maker,
    workers: int,
    seed: int,
    engine: Engine,
    *,
    reporting: bool = True,
    stall: float = 0.0,
    routers: int = 1,
) -> Result:
    """One run; the first tenth of the requests warms the caches and is not counted."""
    started = time.thread_time()
    rng = random.Random(seed)
    clock = Clock()
    fleet = [
        SimWorker(
            f"w{i}", engine, 0.5 if i == workers // 2 else 1.0, clock, trace.block_size, reporting
        )
        for i in range(workers)
    ]
    middle = trace.requests[-1].at / 2
    fleet[0].stall = (middle, middle + stall)
    policies = []
    for _ in range(routers):
        index = PrefixIndex(IndexSettings(blocks=1 << 19), clock=clock)
        policies.append((make(trace, rng), [worker.seen_by(index) for worker in fleet]))
    requests = iter(trace.requests)

    def arrive(request: Request) -> None:
        policy, known = policies[rng.randrange(routers)]
        view = RoutingView(request.prompt, blocks=TraceBlocks(request))
        chosen = known[policy.choose(view, known)]
        place = chosen.backlog.reserve(policy.charge(view, chosen), request.prompt)
        policy.reserved(view, chosen)
        chosen.worker.take(request, place)
        following = next(requests, None)
        if following is not None:
            clock.after(following.at - clock.now, lambda: arrive(following))

    def report(worker: SimWorker) -> None:
        worker.report()
        if clock.now < trace.requests[-1].at:
            clock.after(REPORT_INTERVAL, lambda: report(worker))

    first = next(requests)
    clock.after(first.at, lambda: arrive(first))
    for worker in fleet:
        clock.after(rng.random() * REPORT_INTERVAL, lambda w=worker: report(w))
    clock.run()

    since = trace.requests[len(trace.requests) // 10].at
    waits = np.array([t for w in fleet for at, t in w.times if at >= since])
    busy = [w.busy for w in fleet]
    return Result(
        float(waits.mean()),
        float(np.percentile(waits, 99)),
        sum(w.hit_blocks for w in fleet) / max(1, sum(w.all_blocks for w in fleet)),
        max(busy) / statistics.mean(busy),
        len(trace.requests) / (time.thread_time() - started),
    )


def traces(workers: int, seed: int, minutes: float, files: list[Path]) -> list[Trace]:
    """Traces for a fleet of that size: the more workers, the more users."""
    seconds, scale = minutes * 60, workers / 8
    made = [
        conversation(seed, rate=3.4 * scale, seconds=seconds),
        synthetic(seed, rate=3.9 * scale, seconds=seconds),
        multimodal(seed, rate=12.0 * scale, seconds=seconds),
    ]
    return made + [mooncake(file) for file in files]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0, help="simulated time")
    parser.add_argument("--rate", type=float, default=7000, help="prefill tokens/s of a worker")
    parser.add_argument(
        "--stall", type=float, default=0, help="seconds that one worker hangs in the middle"
    )
    parser.add_argument("--mooncake", type=Path, nargs="*", default=[], help="JSONL traces")
    parser.add_argument("--only", nargs="*", help="names of traces")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--routers", type=int, default=1, help="that do not know of each other")
    parser.add_argument("--approximate", action="store_true", help="workers send no events")
    parser.add_argument("--plots", type=Path, help="folder for PNG files")
    given = parser.parse_args()
    for workers in given.workers:
        runs: Runs = {}
        for seed in range(1, given.seeds + 1):
            for trace in traces(workers, seed, given.minutes, given.mooncake):
                if given.only and trace.name not in given.only:
                    continue
                for name in given.policies:
                    result = simulate(
                        trace,
                        POLICIES[name],
                        workers,
                        seed,
                        Engine(prefill_rate=given.rate),
                        reporting=not given.approximate,
                        stall=given.stall,
                        routers=given.routers,
                    )
                    runs.setdefault((trace.name, name), []).append(result)
        show(workers, given.minutes, given.seeds, runs)
        if given.plots:
            plot(workers, runs, given.plots / f"routing-{workers}.png")


Runs = dict[tuple[str, str], list[Result]]


def show(workers: int, minutes: float, seeds: int, runs: Runs) -> None:
    """A Markdown table of means over the seeds."""
    print(f"\n{workers} workers, one at half speed, {minutes:g} minutes, {seeds} seeds\n")
    print("| trace | policy | mean TTFT s | p99 TTFT s | hit rate | imbalance | requests/s |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for (trace, policy), results in runs.items():
        mean = statistics.mean
        print(
            f"| {trace} | {policy} | {mean(r.mean for r in results):.2f} "
            f"| {mean(r.p99 for r in results):.2f} | {mean(r.hits for r in results):.1%} "
            f"| {mean(r.imbalance for r in results):.2f} | {mean(r.rate for r in results):.0f} |",
            flush=True,
        )


def plot(workers: int, runs: Runs, file: Path) -> None:
    """Bars of mean and p99 TTFT and hit rate; whiskers from the lowest seed to the highest."""
    # Only here: it comes with the `bench` extra.
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(trace for trace, _ in runs))
    policies = list(dict.fromkeys(policy for _, policy in runs))
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = ("mean TTFT, s", "p99 TTFT, s", "blocks found cached")
    for panel, title, value in zip(
        panels, titles, (lambda r: r.mean, lambda r: r.p99, lambda r: r.hits), strict=True
    ):
        for i, policy in enumerate(policies):
            seen = [[value(r) for r in runs[name, policy]] for name in names]
            heights = [statistics.mean(values) for values in seen]
            spread = [
                [h - min(values) for h, values in zip(heights, seen, strict=True)],
                [max(values) - h for h, values in zip(heights, seen, strict=True)],
            ]
            places = [x + (i - 2.5) * 0.14 for x in range(len(names))]
            panel.bar(places, heights, 0.13, yerr=spread, label=policy, error_kw={"lw": 0.8})
        panel.set_xticks(range(len(names)), names)
        panel.set_title(title)
        if "TTFT" in title:
            panel.set_yscale("log")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.suptitle(f"{workers} workers, one at half speed")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
