"""Who runs and who waits, how long prefill takes, and what the engine reports of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import grpc
import numpy as np

from router.wire import common, engine
from workers.sim.events import Change, Cleared
from workers.sim.job import Job
from workers.sim.kvcache import KvCache
from workers.sim.options import SimOptions
from workers.sim.refused import Refused

# Throughput is measured over windows of at least so many seconds.
RATE_WINDOW = 0.5


class Scheduler:
    """At most `max_num_seqs` jobs run, the others wait in the order they came.

    Prefill is one resource for all jobs: they take their turn at
    `prefill_rate`. Decoding takes each job `time_per_output_token` a token,
    however many run.
    """

    def __init__(
        self,
        options: Callable[[], SimOptions],
        cache: KvCache,
        publish: Callable[[Iterable[Change]], None],
    ) -> None:
        self._options = options
        self._cache = cache
        self._publish = publish
        self._running: dict[Job, None] = {}
        self._waiting: deque[Job] = deque()
        self._prefilling: dict[Job, None] = {}
        self._prefill_free_at = 0.0
        self._last_output = time.monotonic()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated = 0
        self._rate = 0.0
        self._rate_mark = (time.monotonic(), 0)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def admit(self, job: Job) -> None:
        """Returns when the job may run, or when it was ended while it waited.

        Refused with UNAVAILABLE when as many wait as may.
        """
        if self._cache.sharing:
            job.chained = self._cache.chain(job.ids, job.placed)
        matched = self._cache.match(job.chained, job.prompt_tokens)
        if not job.prefilled:
            job.uncached_tokens = job.prompt_tokens - matched * self._cache.block_size
        if not self._waiting and self._has_room(job):
            self._start(job)
            return
        self.check_queue()
        self._waiting.append(job)
        try:
            while job not in self._running and not job.ended:
                await job.pause(None)
        finally:
            if job not in self._running:
                self._waiting.remove(job)
                # Whoever stood behind it may fit where it did not.
                self._start_waiting()

    def check_queue(self) -> None:
        """Refused with UNAVAILABLE when one more could neither run nor wait."""
        full = len(self._running) >= self._options().max_num_seqs or bool(self._waiting)
        if full and len(self._waiting) >= self._options().waiting_limit:
            raise saturated(self.running, self.waiting)

    async def prefill(self, job: Job) -> None:
        """Takes the job's turn at the prefill, then makes its prompt's blocks findable."""
        rate = self._options().prefill_rate
        self._prefilling[job] = None
        try:
            if rate:
                cost = job.uncached_tokens / rate
                start = max(time.monotonic(), self._prefill_free_at)
                self._prefill_free_at = start + cost
                try:
                    await job.pause(self._prefill_free_at - time.monotonic())
                finally:
                    self._give_back_turn(start, cost)
        finally:
            self._prefilling.pop(job, None)
        if job.holding is not None and not job.ended:
            blocks = job.chained[job.holding.cached_blocks :]
            self._publish(self._cache.store(job.holding, blocks))

    def _give_back_turn(self, start: float, cost: float) -> None:
        """What a job that was ended did not use of its turn goes to those who come next."""
        unused = min(cost, start + cost - time.monotonic())
        if unused > 0:
            self._prefill_free_at -= unused

    def produced(self, tokens: int) -> None:
        """Some job gave output."""
        self._generated += tokens
        self._last_output = time.monotonic()

    def grow(self, job: Job, output_ids: list[int], upto: int, before: int) -> None:
        """Stores the blocks that the first choice's output filled from `before` to `upto`."""
        size = self._cache.block_size
        prompt = job.prompt_tokens
        if (
            job.holding is None
            or not self._cache.sharing
            or (prompt + upto) // size == (prompt + before) // size
        ):
            return
        first = (prompt + before) // size * size
        tail = job.ids[first:] if first < prompt else np.empty(0, np.uint32)
        said = np.asarray(output_ids[max(first - prompt, 0) : upto], dtype=np.uint32)
        # Media lie before `first` or reach into it; offsets are relative to what is hashed here.
        placed = [
            type(item)(item.identifier, item.offset - first, item.length) for item in job.placed
        ]
        blocks = self._cache.chain(np.concatenate([tail, said]), placed, job.holding.tail)
        self._publish(self._cache.store(job.holding, blocks))

    def release(self, job: Job) -> None:
        """Gives up what the job holds, and lets the next one start. Harmless when repeated."""
        if job not in self._running:
            return
        del self._running[job]
        if job.holding is not None:
            self._cache.release(job.holding)
        self._start_waiting()

    def flush(self) -> bool:
        """Empties the prefix cache; False while requests hold blocks."""
        if not self._cache.clear():
            return False
        self._publish([Cleared()])
        return True

    def _has_room(self, job: Job) -> bool:
        return len(self._running) < self._options().max_num_seqs and self._cache.fits(
            job.chained, job.prompt_tokens, job.total_tokens
        )

    def _start_waiting(self) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            job = self._waiting.popleft()
            self._start(job)
            job.wake()

    def _start(self, job: Job) -> None:
        if not self._running:
            self._last_output = time.monotonic()
        self._running[job] = None
        job.holding, removed = self._cache.hold(job.chained, job.prompt_tokens, job.total_tokens)
        job.cached_tokens = job.holding.cached_blocks * self._cache.block_size
        if job.prefilled:
            job.cached_tokens = job.prompt_tokens - 1
        job.uncached_tokens = job.prompt_tokens - job.cached_tokens
        self._prompt_tokens += job.prompt_tokens
        self._cached_tokens += job.cached_tokens
        self._publish(removed)

    # ---- What it reports ----

    def _throughput(self) -> float:
        """Output tokens per second over the last whole window; 0 while nothing was made."""
        since, before = self._rate_mark
        now = time.monotonic()
        if now - since >= RATE_WINDOW:
            self._rate = (self._generated - before) / (now - since)
            self._rate_mark = (now, self._generated)
        return self._rate

    @property
    def _hit_rate(self) -> float:
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    def load(self) -> common.EngineLoad:
        """The load at this moment."""
        cache = self._cache
        record = common.EngineLoad(
            running_requests=self.running,
            waiting_requests=self.waiting,
            waiting_uncached_tokens=sum(job.uncached_tokens for job in self._waiting),
            token_usage=min(cache.used / cache.capacity, 1.0),
            active_token_usage=min(cache.held / cache.capacity, 1.0),
            gen_throughput=self._throughput(),
            max_running_requests=self._options().max_num_seqs,
            cache_hit_rate=self._hit_rate,
            num_used_tokens=cache.used * cache.block_size,
            max_total_num_tokens=cache.capacity * cache.block_size,
            queues=common.EngineQueues(waiting=self.waiting),
            engine_reports_steps=False,
            prefill_pending_tokens=sum(job.uncached_tokens for job in self._prefilling)
            + sum(job.uncached_tokens for job in self._waiting),
        )
        silent = time.monotonic() - self._last_output if self._running else 0.0
        record.engine_silence_ms = round(silent * 1000)
        return record

    def scheduler_load(self) -> engine.SchedulerLoad:
        """The same as GetLoads words it."""
        load = self.load()
        return engine.SchedulerLoad(
            dp_rank=0,
            num_running_reqs=load.running_requests,
            num_waiting_reqs=load.waiting_requests,
            num_total_reqs=load.running_requests + load.waiting_requests,
            num_used_tokens=load.num_used_tokens,
            max_total_num_tokens=load.max_total_num_tokens,
            token_usage=load.token_usage,
            gen_throughput=load.gen_throughput,
            cache_hit_rate=load.cache_hit_rate,
            utilization=load.running_requests / load.max_running_requests,
            max_running_requests=load.max_running_requests,
            num_waiting_uncached_tokens=load.waiting_uncached_tokens,
        )


def saturated(running: int, waiting: int) -> Refused:
    """The answer of a worker whose queue is full."""
    return Refused(
        grpc.StatusCode.UNAVAILABLE,
        f"worker is saturated: {running} requests run and {waiting} wait",
    )
