"""The attempt loop: select, call, classify, exclude, back off, select again.

The constraint, the bytes and the deadline are those of the first attempt.
Nothing is prepared again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from router.faults import Fault, Reason
from router.fleet.breaker import CallResult
from router.fleet.fleet import Fleet
from router.fleet.worker import Lease, Outgoing, Worker, WorkerState
from router.observe.logging import get_logger
from router.observe.metrics import Metrics
from router.observe.tracing import Tracing
from router.policy.models import Policies
from router.prefix.learn import References, Watch
from router.request import failure
from router.request.admission import draining
from router.request.attempt import CUT, Attempt, Journey, Order, Running, shown_id
from router.request.constraint import WireConstraint
from router.request.failure import Media
from router.request.relay import AttemptFailed, Limits, Progress, being_cancelled, connect
from router.request.retry import Attempts, RetryBudget, RetrySettings
from router.request.select import OverloadRule, Survey, select, survey
from router.request.shm import SharedMemory
from router.vision.tensors import Batch
from router.wire import ENGINE_SERVICE, common, engine

_log = get_logger("request")

# Makes the ids of this process' attempts its own.
_PROCESS = secrets.token_hex(6)
# How often it is looked whether a worker has become available, in seconds.
_LOOK_AGAIN = 0.05


Exchange = Callable[[Attempt], Awaitable[None]]

# Follows what a worker reports of media that go there now; None where that tells nothing.
WatchReferences = Callable[[Worker, References], Watch | None]

# One try at an order, given the workers that were tried before: how it failed, and on whom.
Once = Callable[
    ["Order", frozenset[Worker]], Awaitable[tuple[AttemptFailed | None, frozenset[Worker]]]
]


@dataclass(frozen=True)
class Patience:
    """Waiting for a worker to become available, until a moment in loop time."""

    until: float

    async def look_again(self, fault: Fault) -> bool:
        """Whether a choice that failed is worth another one; waits a moment if it is."""
        if not _may_pass(fault) or asyncio.get_running_loop().time() + _LOOK_AGAIN > self.until:
            return False
        await asyncio.sleep(_LOOK_AGAIN)
        return True


class Dispatcher:
    """Sends orders to workers."""

    def __init__(
        self,
        fleet: Fleet,
        policies: Policies,
        metrics: Metrics,
        *,
        retry: RetrySettings,
        budget: RetryBudget,
        overload: OverloadRule,
        limits: Limits,
        load_interval: float,
        worker_wait: float = 1.0,
        max_message_bytes: int = 512 << 20,
        shared: SharedMemory | None = None,
        rng: random.Random | None = None,
        tracing: Tracing | None = None,
        watch: WatchReferences = lambda worker, references: None,
    ) -> None:
        self._watch = watch
        self._shared = shared
        self._worker_wait = worker_wait
        self.limits = limits
        self.policies = policies
        self.running = Running()
        self._fleet = fleet
        self.tracing = tracing or Tracing()
        self._metrics = metrics
        self._retry = retry
        self._budget = budget
        self._overload = overload
        self._max_message_bytes = max_message_bytes
        self.shed_hint = max(1.0, load_interval)
        self.rng = rng or random.Random()
        # One series a policy, looked up once.
        self._chosen = functools.cache(lambda policy: metrics.selections.labels(policy, "single"))
        self._aborts: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)

    def survey(self, constraint: WireConstraint, tried: frozenset[Worker] = frozenset()) -> Survey:
        """Every worker of the order's model, judged as of now."""
        registry = self._fleet.registry
        return survey(
            registry.of_model(constraint.model),
            constraint,
            self._overload,
            registry.clock(),
            tried=tried,
            unreadable=registry.unreadable,
        )

    def check(self, constraint: WireConstraint) -> None:
        """Raises the `Fault` that a choice under this constraint would raise now."""
        seen = self.survey(constraint)
        if not seen.admissible:
            raise seen.fault(retry_after=self.shed_hint)

    def now(self) -> float:
        """The registry's clock, in seconds."""
        return self._fleet.registry.clock()

    async def run(self, order: Order, once: Once, journey: Journey) -> None:
        """Carries out an order with as many attempts as are allowed.

        Raises `Fault` for the last failure; CancelledError when the client is
        gone.
        """
        loop = asyncio.get_running_loop()
        attempts = Attempts(self._retry, self._budget, self.rng)
        tried: frozenset[Worker] = frozenset()
        patience = None
        while True:
            attempts.made += 1
            try:
                failed, workers = await once(order, tried)
            except Fault as fault:
                patience = patience or self._patience(order.deadline)
                if not await patience.look_again(fault):
                    raise
                attempts.made -= 1
                continue
            if failed is None:
                self._budget.succeeded()
                return
            tried |= workers
            order = order.grown_by(failed.grown)
            pause = attempts.pause_after(failed.why, time_left=order.deadline - loop.time())
            if pause is None:
                raise failed.why.fault
            self._metrics.retries.labels(failed.why.fault.reason.name.lower()).inc()
            await asyncio.sleep(pause)
            patience = None

    async def available(self, check: Callable[[], None], deadline: float) -> None:
        """Waits, for a bounded time, while `check` raises that no worker is available.

        Raises the `Fault` that remains.
        """
        patience = self._patience(deadline)
        while True:
            try:
                return check()
            except Fault as fault:
                if not await patience.look_again(fault):
                    raise

    def _patience(self, deadline: float) -> Patience:
        return Patience(min(deadline, asyncio.get_running_loop().time() + self._worker_wait))

    def single(self, exchange: Exchange, journey: Journey) -> Once:
        """One attempt with one worker, in the form that `run` asks for."""

        async def once(
            order: Order, tried: frozenset[Worker]
        ) -> tuple[AttemptFailed | None, frozenset[Worker]]:
            policy = self.policies.of(order.constraint.model)
            with self.tracing.step("select"):
                seen = self.survey(order.constraint, tried)
                lease = select(seen, order.view, policy, retry_after=self.shed_hint)
            self._chosen(policy.name).inc()
            attempt = self.attempt(order, lease)
            journey.begin(lease.worker.address, attempt.progress)
            return await self.carry(order, attempt, exchange), frozenset({lease.worker})

        return once

    def attempt(self, order: Order, lease: Lease) -> Attempt:
        """A call to be made, under a request id that no other call has."""
        # A client's id may be of any length; a worker needs none of it, people want to see it.
        own_id = f"{shown_id(order.request_id)}-{_PROCESS}{next(self._numbers):x}"
        progress = Progress(worker_silence=lease.worker.silence)
        return Attempt(lease, own_id, order.deadline, method=order.method, progress=progress)

    async def carry(
        self, order: Order, attempt: Attempt, exchange: Exchange
    ) -> AttemptFailed | None:
        """Makes one call, and releases its lease however the call ends.

        `exchange` makes the call itself and raises `AttemptFailed`.
        """
        worker = attempt.worker
        self.running.add(order.request_id, attempt)
        if order.active is not None:
            order.active.attempts += 1
        result, outcome = CallResult.NEUTRAL, "cancelled"
        watch: Watch | None = None
        try:
            if order.references is not None:
                watch = self._watch(worker, order.references)
            call = self._traced if self.tracing.on else self._call
            await call(attempt, exchange)
            if attempt.was_cut:
                raise draining(CUT)
            result, outcome = CallResult.SUCCESS, "ok"
            return None
        except AttemptFailed as failed:
            if ended := attempt.ended:
                # Nobody wants another attempt.
                raise ended from None
            if attempt.on_break is not None and attempt.progress.started:
                attempt.on_break(failed)
            result, outcome = failed.why.result, failed.why.fault.reason.name.lower()
            _log.info(
                "attempt_failed",
                worker=worker.address,
                reason=outcome,
                why=failed.why.fault.message,
            )
            if failed.why.reread:
                self._fleet.reread(worker)
            elif result is CallResult.FAILURE:
                self._fleet.suspect(worker)
            # Not `failed` itself: its traceback leads to the call, and as long as anything
            # does, the call's connection stays open, whether its channel is closed or not.
            return AttemptFailed(failed.why, grown=failed.grown)
        finally:
            attempt.lease.release(result)
            self.running.remove(order.request_id, attempt)
            if order.active is not None:
                order.active.attempts -= 1
            attempt.call = None
            attempt.over.set()
            if watch is not None:
                watch.close(attempt.progress if result is CallResult.SUCCESS else None)
            if self._fleet.registry.get(worker.address) is not None:
                # A late result must not bring back the series of one that is gone.
                self._metrics.attempts.labels(worker.address, outcome).inc()

    @asynccontextmanager
    async def sharing(
        self, batches: Sequence[Batch], attempt: Attempt
    ) -> AsyncIterator[Sequence[common.ShmHandle] | None]:
        """The batches' pixels in memory that the attempt's worker shares, for this one call.

        None where they must go inline.
        """
        segment = None
        if batches and self._shared is not None:
            segment = await self._shared.share(batches, attempt.worker)
        del batches
        if segment is None:
            yield None
            return
        try:
            yield segment.handles
        finally:
            segment.unlink()

    def call(self, attempt: Attempt, wire: bytes) -> grpc.aio.UnaryStreamCall[Outgoing, bytes]:
        """Begins a Generate. Raises `AttemptFailed` when `wire` is over the limit of a message."""
        if len(wire) > self._max_message_bytes:
            raise AttemptFailed(failure.too_large(len(wire), self._max_message_bytes))
        attempt.begin()
        call = attempt.worker.generate(
            Outgoing(wire), timeout=attempt.time_left(), metadata=attempt.headers or None
        )
        attempt.call = call
        return call

    async def abort(self, attempt: Attempt) -> None:
        """Has a worker end a request, and returns when it was told.

        That the call ends is seen to even if whoever asked for it does not wait.
        """
        attempt.aborted = True
        self.abort_soon(attempt)
        await attempt.told.wait()

    def abort_soon(self, attempt: Attempt) -> None:
        """Tells a worker to end a request, without waiting: the caller may be on its way out."""
        task = asyncio.create_task(attempt.tell_abort(), name=f"abort {attempt.id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Waits for the last aborts to be told."""
        if self._aborts:
            await asyncio.wait(self._aborts)

    async def _traced(self, attempt: Attempt, exchange: Exchange) -> None:
        method = f"{ENGINE_SERVICE}/{attempt.method}"
        with self.tracing.client(method, attempt.worker.address) as span:
            attempt.headers = span.headers()
            began = time.monotonic()
            try:
                await self._call(attempt, exchange)
            except AttemptFailed as failed:
                span.fail(failed.why.fault.reason.name.lower(), failed.why.fault.message)
                raise
            finally:
                span.tell({"mmrouter.worker_request_id": attempt.id})
                first = attempt.progress.first_output_at
                if first is not None:
                    span.child("first_output", began, first)

    async def _call(self, attempt: Attempt, exchange: Exchange) -> None:
        worker = attempt.worker
        try:
            await connect(worker.channel, self.limits.connect)
            await exchange(attempt)
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # What grpc says of a channel that was closed: the worker's, when it is removed.
            if worker.state is not WorkerState.GONE or being_cancelled():
                raise
            started = attempt.progress.started
            raise AttemptFailed(failure.removed(started=started)) from None


def _may_pass(fault: Fault) -> bool:
    """Whether the next moment may bring a worker: there are some, only not now."""
    if fault.reason is Reason.NO_COMPATIBLE_PAIR:
        return True
    return fault.reason is Reason.NO_AVAILABLE_WORKER and fault.metadata.get("registered") != "0"


async def unary(
    call: grpc.aio.UnaryUnaryCall[bytes, bytes], *, limits: Limits, progress: Progress
) -> bytes:
    """The answer of an Embed, as it came, under the first-output limit.

    Raises `AttemptFailed`.
    """
    try:
        async with asyncio.timeout(limits.first_output):
            answer = await call
        engine.EmbedResponse.FromString(answer)
    except DecodeError as error:
        raise AttemptFailed(failure.unreadable("EmbedResponse", started=False)) from error
    except grpc.aio.AioRpcError as error:
        left = call.time_remaining() or 0.0
        raise AttemptFailed(
            failure.of_call(error, started=False, media=Media.NONE, time_left=left)
        ) from error
    except TimeoutError:
        raise AttemptFailed(
            failure.timed_out("first_output", limits.first_output, started=False)
        ) from None
    except asyncio.CancelledError:
        if being_cancelled():
            raise
        raise AttemptFailed(failure.removed(started=False)) from None
    finally:
        call.cancel()
    progress.messages += 1
    return answer
