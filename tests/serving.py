"""A whole router in this process, in front of simulated workers, and a client of it."""

from __future__ import annotations

import asyncio
import base64
import gc
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router import config
from router.app import App
from router.fleet.worker import Worker, WorkerState
from router.wire import common, engine, router_pb2_grpc
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from workers.sim import SimOptions, SimWorker
from workers.sim.tokenizer import decode, encode

IMAGES = Path(__file__).parent / "data" / "images"
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
MODEL = SimOptions().model

# For things that take milliseconds, or a second where the machine is at rest.
PATIENCE = 30.0

_LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
# Brisk probes, so that nothing here waits for an interval.
_BRISK = {
    "listen": "127.0.0.1:0",
    "http": "",
    "health_interval": "50ms",
    "load_interval": "50ms",
    # Patient where a busy machine is slow: who wants a limit sets it.
    "health_timeout": "60s",
    "connect_timeout": "60s",
    "queue_timeout": "60s",
    "media_budget_wait": "5s",
    "silence_timeout": "60s",
}


async def eventually(
    condition: Callable[[], object], what: str = "", timeout: float = PATIENCE
) -> None:
    """Waits until `condition()` is true; fails after `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            while not condition():  # noqa: ASYNC110 - what it waits for tells nobody
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within {timeout}s: {what or condition}") from None


@dataclass(frozen=True)
class Refusal:
    """An RPC's error as a client reads it; `reason` is empty without ErrorInfo."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    domain: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    retry_after: timedelta | None = None
    trailers: tuple[tuple[str, str | bytes], ...] = ()

    @property
    def about(self) -> dict[str, str]:
        return dict(self.metadata)

    @property
    def route(self) -> dict[str, str]:
        """The trailing metadata that say where the request went."""
        prefix = "mmrouter-"
        return {k.removeprefix(prefix): str(v) for k, v in self.trailers if k.startswith(prefix)}

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Refusal:
        trailers = tuple(error.trailing_metadata() or ())
        details = dict(trailers).get("grpc-status-details-bin", b"")
        status = status_pb2.Status.FromString(details)
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        for detail in status.details:
            assert detail.Unpack(info) or detail.Unpack(retry), detail.type_url
        if details:
            assert status.code == error.code().value[0]
            assert status.message == error.details()
        return cls(
            error.code(),
            error.details() or "",
            info.reason,
            info.domain,
            tuple(sorted(info.metadata.items())),
            retry.retry_delay.ToTimedelta() if retry.HasField("retry_delay") else None,
            trailers,
        )


@dataclass
class Serving:
    """A running router, its workers and a client."""

    app: App
    workers: list[SimWorker]
    channel: grpc.aio.Channel
    stub: Any
    _running: asyncio.Task[None]

    # -- Calls

    async def generate(
        self,
        request: engine.GenerateRequest,
        metadata: Sequence[tuple[str, str]] = (),
        timeout: float = 60,
    ) -> list[engine.GenerateResponse]:
        call = self.stub.Generate(request, metadata=tuple(metadata), timeout=timeout)
        return [response async for response in call]

    async def say(self, request: engine.GenerateRequest) -> str:
        """The text of the only choice."""
        responses = await self.generate(request)
        ids = [token for r in responses for token in r.chunk.token_ids]
        return decode(ids or responses[-1].complete.output_ids, special=False)

    async def route(self, request: engine.GenerateRequest) -> dict[str, str]:
        """The trailing metadata of a call that succeeds."""
        call = self.stub.Generate(request, timeout=60)
        async for _ in call:
            pass
        trailers = await call.trailing_metadata()
        return {k.removeprefix("mmrouter-"): str(v) for k, v in trailers}

    async def refusal(
        self,
        request: engine.GenerateRequest,
        metadata: Sequence[tuple[str, str]] = (),
        timeout: float = 60,
    ) -> Refusal:
        """The error that a Generate ends with; fails when it ends well."""
        return await refusal_of(self.generate(request, metadata, timeout))

    async def health(self, service: str = "") -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return int(answer.status)

    @property
    def admin(self) -> Any:
        return router_pb2_grpc.RouterAdminStub(self.channel)

    # -- State

    def let_breaker_rest(self, position: int = 0) -> None:
        """Makes it an hour later for a worker's breaker, so that no test races its time."""
        self.worker(position).breaker._clock = lambda: time.monotonic() + 3600.0

    def worker(self, position: int = 0) -> Worker:
        """The router's own view of one of the workers."""
        found = self.app.registry.get(self.workers[position].address)
        assert found is not None
        return found

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 where there is none."""
        return self.app.metrics.registry.get_sample_value(name, labels) or 0.0

    def outcomes(self) -> dict[tuple[str, str], float]:
        """Finished requests by (outcome, reason), over all models."""
        counted: dict[tuple[str, str], float] = {}
        for sample in self.samples("router_requests_total"):
            key = sample.labels["outcome"], sample.labels["reason"]
            counted[key] = counted.get(key, 0) + sample.value
        return counted

    def samples(self, name: str) -> list[Any]:
        metrics = self.app.metrics.registry.collect()
        return [s for metric in metrics for s in metric.samples if s.name == name]

    async def at_rest(self) -> None:
        """Waits until nothing is in flight, here, in leases and at the workers."""
        await eventually(
            lambda: (
                not self.metric("router_requests_in_flight")
                and not self.app.admission.active
                and not any(w.load.in_flight or w.load.reserved_tokens for w in self.app.registry)
                and not any(w.stats.live for w in self.workers)
                and not self.app.dispatcher.running.all()
            ),
            "at rest",
        )

    async def ready(self) -> None:
        """Waits until the router is warm and every registered worker is ready."""
        await eventually(
            lambda: self.app.warm and all(w.state is WorkerState.READY for w in self.app.registry),
            "ready",
        )

    async def stopped(self) -> None:
        """Waits for the router to end by itself."""
        async with asyncio.timeout(PATIENCE):
            await self._running


async def refusal_of(call: Awaitable[Any]) -> Refusal:
    """The error that a call ends with; fails when it ends well."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return Refusal.of(error)
    raise AssertionError("the call ended with OK")


@asynccontextmanager
async def serving(
    *workers: SimOptions | str, ready: bool = True, **settings: Any
) -> AsyncIterator[Serving]:
    """A router in front of one worker for each of `workers` (an address stands for itself).

    `settings` are those of the router as the command line would give them.
    """
    async with AsyncExitStack() as stack:
        simulated: list[SimWorker] = []
        addresses: list[str] = []
        for options in workers:
            if isinstance(options, str):
                addresses.append(options)
                continue
            worker = SimWorker(options)
            addresses.append(await worker.start("127.0.0.1:0"))
            stack.push_async_callback(worker.stop, 0)
            simulated.append(worker)
        app = App(config.load({**_BRISK, "worker": ",".join(addresses), **settings}))
        running = asyncio.create_task(app.run())
        stack.push_async_callback(_end, app, running)
        # A router that cannot start must not be waited for.
        await eventually(
            lambda: running.done() or (app.listen and len(app.registry) >= len(addresses))
        )
        if running.done():
            await running
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(app.listen, options=_LARGE)
        )
        served = Serving(app, simulated, channel, VllmEngineStub(channel), running)
        if ready:
            await served.ready()
        yield served


async def _end(app: App, running: asyncio.Task[None]) -> None:
    # Twice: tests that leave calls open need not wait for them.
    app.stop()
    app.stop()
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait([running])
    # A router lasts as long as its process, elsewhere; here what it has frozen must go with it.
    gc.unfreeze()
    if not running.cancelled():
        running.result()


# -- Workers


@contextmanager
def nobody_at(count: int = 1) -> Iterator[list[str]]:
    """Addresses of this host where nobody listens, and where nobody else can begin to.

    A simulated worker of the test's own may.
    """
    with ExitStack() as stack:
        addresses = []
        for _ in range(count):
            held = stack.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{held.getsockname()[1]}")
        yield addresses


def hold_answers(worker: SimWorker) -> asyncio.Event:
    """From now on each of a worker's answers waits behind its first chunk for the event,
    and then goes on to its own end.
    """
    go_on, meet = asyncio.Event(), worker.engine._meet

    async def held(job: Any, trouble: Any, chunks: int) -> None:
        if chunks:
            await go_on.wait()
        await meet(job, trouble, chunks)

    worker.engine._meet = held  # type: ignore[method-assign]
    return go_on


# -- Requests


def tokenized(text: str, request_id: str = "", **sampling: Any) -> engine.GenerateRequest:
    return engine.GenerateRequest(
        request_id=request_id,
        tokenized=engine.TokenizedInput(input_ids=encode(text)),
        sampling_params=engine.SamplingParams(**sampling),
    )


def streamed(text: str, request_id: str = "", **sampling: Any) -> engine.GenerateRequest:
    request = tokenized(text, request_id, **sampling)
    request.stream = True
    return request


def seeing(text: str, *urls: str, **sampling: Any) -> engine.GenerateRequest:
    """A prompt with a picture reference for each URL; `text` holds an anchor for each."""
    request = tokenized(text, **sampling)
    for url in urls:
        request.media_refs.items.add(modality=common.IMAGE, url=url)
    return request


def image(name: str) -> bytes:
    return (IMAGES / name).read_bytes()


def data_url(name: str) -> str:
    """A file of tests/data/images as a data: URL."""
    return f"data:image/png;base64,{base64.b64encode(image(name)).decode()}"


def chunk_ids(responses: Sequence[engine.GenerateResponse], index: int = 0) -> list[int]:
    """All ids of one choice of a stream, from its chunks alone."""
    return [
        token
        for response in responses
        if response.HasField("chunk") and response.chunk.index == index
        for token in response.chunk.token_ids
    ]


def completes(responses: Sequence[engine.GenerateResponse]) -> list[engine.GenerateComplete]:
    return [response.complete for response in responses if response.HasField("complete")]
