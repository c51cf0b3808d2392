"""The router as a whole: builds the object graph, starts and stops it in order."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import grpc

from router.config import Settings
from router.faces import Faces
from router.fleet.discovery.reconcile import Reconciler
from router.fleet.discovery.sources import discoveries
from router.fleet.fleet import Fleet
from router.fleet.registry import Registry
from router.heap import allocator, watch_freed_memory
from router.kernels import compile_apart
from router.media.gauges import media_gauges
from router.media.intake import MediaIntake
from router.observe.lag import watch_loop_lag
from router.observe.logging import announce, get_logger, lost_gauge
from router.observe.metrics import Metrics
from router.prefix.gauges import prefix_gauges
from router.prefix.warm import compile_ahead
from router.request.admission import Admission, draining
from router.request.attempt import CUT
from router.request.decide import Decider
from router.request.disagg import Pairs
from router.request.dispatch import Dispatcher
from router.request.explain import Explainer
from router.request.gauges import request_gauges
from router.request.pipeline import Pipeline
from router.request.prepare import Preparer
from router.request.residents import Residents
from router.request.retry import RetryBudget, RetrySettings
from router.request.tensors_out import TensorMaker
from router.rooms import (
    CannotStart,
    backend_gauge,
    breaker_settings,
    call_limits,
    channel_settings,
    decide_settings,
    media_limits,
    overload_rule,
    pair_settings,
    pipeline_settings,
    policies_of,
    probe_settings,
    shared_memory,
    tracing_of,
    vision_backend,
)
from router.rpc.account import Accounts
from router.rpc.health import HealthFace
from router.rpc.orders import Orders
from router.rpc.security import Security
from router.rpc.siblings import Siblings
from router.status import StatusPage
from router.supervise.place import Place
from router.units import format_duration, format_size

if TYPE_CHECKING:
    from workers.sim import SimWorker

_log = get_logger("app")

# Seconds that workers get to end what they were told to end.
_CUT_GRACE = 1.5
# Grace for clients to hear of the end, and the same where nothing is to be waited for.
_LAST_GRACE = 2.0
_NO_GRACE = 0.2
# Seconds for a collector to take the last spans.
_LAST_SPANS = 2.0
# How long a process that replaces another waits for a worker before it takes connections.
_HEAD_START = 5.0


class App:
    """One router. `run` lives until `stop` was called and everything has ended.

    Raises `CannotStart` when a file that the settings name cannot be used.
    """

    def __init__(self, settings: Settings, place: Place | None = None) -> None:
        """`place` is that of this process among several on one port."""
        self.settings = settings
        self._place = place
        self._siblings = None if place is None else Siblings(place)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        # Once it has been ready.
        self._ready = asyncio.Event()
        # Kernels are compiled; before, nothing is chosen by its prefix.
        self.warm = False
        self.metrics = Metrics()
        self.tracing = tracing_of(settings)
        self.accounts = Accounts(self.metrics, self.tracing)
        try:
            self.security = Security(settings, self.metrics)
        except ValueError as error:
            raise CannotStart(str(error)) from error
        self.registry = Registry(
            self.metrics,
            channel_settings(settings, self.security),
            breaker_settings(settings),
        )
        self.fleet = Fleet(
            self.registry,
            probe_settings(settings),
            drain_timeout=settings.drain_timeout,
            longest_call=settings.request_timeout,
        )
        self._intake = MediaIntake(
            media_limits(settings), on_sniff=self.metrics.stage.labels("sniff").observe
        )
        self._backend = vision_backend(settings, self.metrics)
        self._shared = shared_memory(settings)
        self.admission = Admission(
            settings.max_concurrent,
            settings.queue_size,
            settings.queue_timeout,
            self.metrics.queue_wait.observe,
        )
        budget = RetryBudget(settings.retry_budget, settings.retry_budget_ratio)
        self.residents = Residents(
            self.registry,
            reread_interval=settings.metadata_interval,
            on_lag=self.metrics.kv_event_lag.observe,
        )
        self.policies = policies_of(settings, self.residents, self.metrics)
        self.dispatcher = Dispatcher(
            self.fleet,
            self.policies,
            self.metrics,
            retry=RetrySettings(max_attempts=settings.retry_max_attempts),
            budget=budget,
            overload=overload_rule(settings),
            limits=call_limits(settings),
            load_interval=settings.load_interval,
            worker_wait=settings.worker_wait,
            max_message_bytes=settings.max_message_bytes,
            shared=self._shared,
            tracing=self.tracing,
            watch=self.residents.watch,
        )
        self.pipeline = Pipeline(
            Decider(self.registry, self.policies, decide_settings(settings)),
            self._intake,
            Preparer(
                self._intake,
                TensorMaker(self._intake, self._backend, self.metrics, self.tracing),
                learned=self.residents.learned,
            ),
            self.dispatcher,
            Pairs(self.dispatcher, self.metrics, pair_settings(settings)),
            self.admission,
            self.metrics,
            pipeline_settings(settings),
        )
        self.health = HealthFace()
        self.faces = Faces(
            settings,
            self.security,
            self.fleet,
            self.pipeline,
            Explainer(self.pipeline, self._intake),
            self.accounts,
            self.health,
            place,
            self._siblings,
        )
        self._status = StatusPage(
            settings, self.registry, self.pipeline, self._intake, self.accounts, self._backend.name
        )
        self.metrics.show(
            [
                *media_gauges(self._intake),
                *prefix_gauges(
                    self.residents.indexes, self.residents.readers, self.residents.learners
                ),
                *request_gauges(self.admission, budget),
                backend_gauge(self._backend),
                lost_gauge(),
            ]
        )

    @property
    def listen(self) -> str:
        """The address of the gRPC listener with its real port, once it is bound."""
        return self.faces.listen

    @property
    def http(self) -> str:
        """The same of HTTP; empty where there is none."""
        return self.faces.http

    def stop(self) -> None:
        """Begins to drain; a second call ends everything at once."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def run(self) -> None:
        """Serves until stopped. Raises `CannotStart`."""
        # Before the listener opens: what calls make must stay in the collector's sight.
        _settle_heap()
        async with AsyncExitStack() as stack:
            if self._shared is not None:
                stack.callback(self._shared.close)
            stack.push_async_callback(self._send_last_spans)
            stack.push_async_callback(self._intake.close)
            await stack.enter_async_context(
                self.faces.pages(self.metrics, self._why_not_ready, self._status)
            )
            simulated = await stack.enter_async_context(self._simulated())
            stack.push_async_callback(self.fleet.close)
            stack.push_async_callback(self.dispatcher.close)
            stack.push_async_callback(self.residents.close)
            orders = await stack.enter_async_context(self.faces.siblings_calls())
            late = self._place is not None and self._place.replacement
            if not late:
                server = await stack.enter_async_context(self.faces.listener())
            self.registry.listen(self._publish_health)
            await stack.enter_async_context(self._discovering(simulated))
            # Before readiness: compiling takes up to a minute on a first start.
            await compile_apart(self._stop)
            if not self._stop.is_set():
                await asyncio.to_thread(self._backend.warm_up)
                if self.policies.may_score_prefixes:
                    await asyncio.to_thread(compile_ahead)
                    self.residents.start(self.policies)
                self.warm = True
            self._publish_health()
            if late:
                await self._catch_up(orders)
                server = await stack.enter_async_context(self.faces.listener())
            self._publish_health()
            self._announce()
            await self._stop.wait()
            await self._drain(server)

    async def _send_last_spans(self) -> None:
        try:
            async with asyncio.timeout(_NO_GRACE if self._stop_now.is_set() else _LAST_SPANS):
                await asyncio.to_thread(self.tracing.close)
        except TimeoutError:
            _log.warning("spans_lost", why="the collector does not answer")

    async def _drain(self, server: grpc.aio.Server) -> None:
        self._publish_health()
        self.admission.stop()
        _log.info("draining", running=self.admission.active)
        try:
            async with asyncio.timeout(self.settings.drain_timeout):
                await _first_of(self.admission.idle, self._stop_now)
        except TimeoutError:
            _log.warning("drain_timeout", running=self.admission.active)
        cut = self.admission.active
        if not self._stop_now.is_set():
            await self._cut()
        # Whoever is left has no worker, or one that does not answer; the client is told so too.
        self.pipeline.active.end_all(lambda: draining(CUT))
        # A request that is done has yet to send its status; the grace ends with the last one.
        await server.stop(_NO_GRACE if self._stop_now.is_set() else _LAST_GRACE)
        if self._stop_now.is_set():
            _log.warning("stopped", cut=cut)
        else:
            _log.info("stopped", cut=cut)

    async def _cut(self) -> None:
        """Has the workers end what runs, so that clients get what there is of it."""
        attempts = self.dispatcher.running.all()
        try:
            async with asyncio.timeout(_CUT_GRACE):
                await asyncio.gather(*(attempt.cut() for attempt in attempts))
                await _first_of(self.admission.idle, self._stop_now)
        except TimeoutError:
            pass  # workers that hang, or requests that have none

    async def _catch_up(self, orders: Orders | None) -> None:
        """Orders that the siblings have, and a worker: without, connections would fail."""
        siblings = self._siblings
        assert siblings is not None and orders is not None, "only a sibling replaces another"
        await siblings.adopt(orders)
        try:
            async with asyncio.timeout(_HEAD_START):
                await _first_of(self._ready, self._stop)
        except TimeoutError:
            pass  # it may be that nobody has one
        # Workers that a source has listed meanwhile may be some that were taken out.
        await siblings.adopt(orders)

    @asynccontextmanager
    async def _discovering(self, simulated: list[str]) -> AsyncIterator[None]:
        try:
            sources = discoveries(self.settings, simulated)
        except ValueError as error:
            raise CannotStart(str(error)) from error
        tasks = [
            asyncio.create_task(Reconciler(self.fleet, sources).run(), name="discovery"),
            asyncio.create_task(self.security.follow(self.fleet), name="certificates"),
            asyncio.create_task(
                watch_loop_lag(self.metrics.loop_lag.observe), name="event loop lag"
            ),
            asyncio.create_task(self._status.history.run(), name="history"),
            asyncio.create_task(watch_freed_memory(allocator()), name="freed memory"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    @asynccontextmanager
    async def _simulated(self) -> AsyncIterator[list[str]]:
        if not self.settings.sim:
            yield []
            return
        from workers.sim import SimOptions, SimWorker

        workers: list[SimWorker] = [SimWorker(SimOptions()) for _ in range(self.settings.sim)]
        try:
            yield [await worker.start("127.0.0.1:0") for worker in workers]
        finally:
            await asyncio.gather(*(worker.stop(0) for worker in workers))

    # -- State for others

    def _why_not_ready(self) -> str | None:
        if self._stop.is_set():
            return "the router is stopping"
        if not self.warm:
            return "kernels are being compiled"
        for model in self.settings.ready_models:
            if not self.registry.routable_for(model):
                return f"no worker of {model} is ready"
        return None if self.registry.routable else "no worker is ready"

    def _publish_health(self) -> None:
        ready = self._why_not_ready() is None
        self.health.set_routable(ready)
        if ready:
            self._ready.set()

    def _announce(self) -> None:
        settings = self.settings
        _log.info(
            "listening",
            grpc=self.listen,
            http=self.http,
            workers=len(self.registry),
            policy=settings.policy,
            mm_processing=settings.mm_processing,
            max_message=format_size(settings.max_message_bytes),
            client_pings_at_least=format_duration(settings.keepalive_min_client_interval),
            worker_pings_every=format_duration(settings.keepalive_worker_interval),
        )
        announce(self.listen)


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def _settle_heap() -> None:
    """Takes what start-up made out of the garbage collector's sight.

    Compiled kernels and libraries live as long as the process; going through
    them at every full collection would cost each request a share.
    """
    gc.collect()
    gc.freeze()
