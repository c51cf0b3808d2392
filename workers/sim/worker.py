"""A simulated worker as one object: start it, ask it what happened, stop it."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.wire import ENGINE_SERVICE
from router.wire.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server
from workers.sim.bootstrap import Bootstrap
from workers.sim.bundle import family_of, model_files, pack
from workers.sim.engine import Engine
from workers.sim.events import EventHub
from workers.sim.faults import Troubles
from workers.sim.health import Health
from workers.sim.kvcache import KvCache
from workers.sim.options import SimOptions
from workers.sim.picture import EncoderCache
from workers.sim.prompt import PromptReader
from workers.sim.references import MediaReferences
from workers.sim.scheduler import Scheduler
from workers.sim.servicer import SimServicer
from workers.sim.stats import Stats

# As the Python servicer of a real worker has them; keepalive stays at gRPC's own
# defaults, which end connections whose client pings more than every 5 minutes.
SERVER_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Two workers on one port would take turns without anybody noticing.
    ("grpc.so_reuseport", 0),
)
_SERVICES = ("", ENGINE_SERVICE)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

# What may change while the worker runs; the rest is built into it.
CHANGEABLE = frozenset(
    {
        "mm_processor",
        "mm_schemes",
        "device_normalize",
        "encoder_dtype",
        "item_limits",
        "encoder_budget",
        "max_context",
        "max_num_seqs",
        "max_waiting",
        "prefill_rate",
        "time_per_output_token",
        "tokens_per_chunk",
        "kv_role",
        "kv_connector",
        "kv_engine_id",
        "kv_cache_dtype",
        "attention_backend",
        "model_dtype",
        "pairing_protocol",
        "served_model",
        "style",
        "mortal",
        "media_identity",
        "gullible",
        "transfer_timeout",
    }
)


class SimWorker:
    """One worker. Several may live in one process; a stopped one is not started again.

    `stats`, `troubles` and `events` are open to whoever wants to look or to
    make trouble.
    """

    def __init__(self, options: SimOptions | None = None) -> None:
        self.options = options or SimOptions()
        self.stats = Stats(self.options.record_requests)
        self.troubles = Troubles(self.options.faults)
        self.encoder = EncoderCache(self.options.encoder_cache_items)
        self.cache = KvCache(
            self.options.kv_blocks,
            self.options.block_size,
            salt=secrets.randbits(63),
            sharing=self.options.prefix_caching,
        )
        self.events = EventHub(lambda: self.scheduler.load(), enabled=self.options.kv_events)
        self.scheduler = Scheduler(self._current, self.cache, self.events.publish)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="sim")
        family = family_of(self.options)
        files = model_files(self.options)
        self._references = (
            MediaReferences(self._current, family, files, self.encoder) if family else None
        )
        reader = PromptReader(self._current, family, self.encoder, self._references, self._threads)
        self.bootstrap = Bootstrap(lambda: self.options.kv_engine_id)
        self.engine = Engine(self._current, reader, self.scheduler, self.stats, self.bootstrap)
        self.servicer = SimServicer(
            self._current,
            self.engine,
            self.scheduler,
            self.events,
            self.stats,
            self.troubles,
            pack(files),
        )
        self.address = ""
        # HOST:PORT at which transfers are fetched, where the options ask for it.
        self.bootstrap_address = ""
        self._health = Health(lambda: self.engine.dead is not None, _SERVICES)
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, listen: str) -> str:
        """Opens the port; returns the address it is bound to. OSError when it cannot be."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_VllmEngineServicer_to_server(self.servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (ENGINE_SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME), server
        )
        self.address = _bind(server, listen)
        await self.set_serving(False)
        await server.start()
        self._server = server
        if self.options.bootstrap:
            self.bootstrap_address = await self.bootstrap.start(self.options.bootstrap)
        self._tasks.append(asyncio.create_task(self._beat()))
        if self.options.warmup:
            self._tasks.append(asyncio.create_task(self._warm_up()))
        else:
            await self.set_serving(True)
        return self.address

    async def stop(self, grace: float | None = None) -> None:
        """Says NOT_SERVING, lets open calls end for `grace` seconds, then closes everything."""
        await self.set_serving(False)
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()
        await self.bootstrap.stop()
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None
        if self._references is not None:
            await self._references.close()
        await asyncio.to_thread(self._threads.shutdown)

    async def set_serving(self, serving: bool) -> None:
        """What health answers from now on; calls are served all the same."""
        self.servicer.serving = serving
        for service in _SERVICES:
            await self._health.set(service, _SERVING if serving else _NOT_SERVING)

    def change(self, **changes: Any) -> None:
        """Changes options of the running worker. ValueError for those that are built in."""
        fixed = changes.keys() - CHANGEABLE
        if fixed:
            raise ValueError(f"cannot change while the worker runs: {', '.join(sorted(fixed))}")
        self.options = replace(self.options, **changes)

    def revive(self) -> None:
        """A new engine in place of a dead one, as after a restart: its caches are empty.

        Subscriptions to events end with DATA_LOSS.
        """
        self.engine.dead = None
        self.encoder.clear()
        self.scheduler.flush()
        self.events.cut()

    def _current(self) -> SimOptions:
        return self.options

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.options.heartbeat)
            self.events.beat()

    async def _warm_up(self) -> None:
        await asyncio.sleep(self.options.warmup)
        await self.set_serving(True)


def _bind(server: grpc.aio.Server, listen: str) -> str:
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}") from error
    if listen.startswith("unix"):
        return listen
    host, _, _ = listen.rpartition(":")
    return f"{host}:{port}"
