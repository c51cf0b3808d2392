"""Health as orchestrators ask for it: gRPC Check and Watch, /livez, /readyz."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.wire import ENGINE_SERVICE
from tests.serving import MODEL, Serving, eventually, serving, streamed
from workers.sim import SimOptions

UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def web() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


async def get(session: aiohttp.ClientSession, served: Serving, path: str) -> tuple[int, str]:
    async with session.get(f"http://{served.app.http}{path}") as answer:
        return answer.status, await answer.text()


async def until(session: aiohttp.ClientSession, served: Serving, path: str, text: str) -> int:
    """Waits for an answer of this text; its status. Compiling kernels may come before."""
    async with asyncio.timeout(60):
        while True:
            status, told = await get(session, served, path)
            if told == text:
                return status
            await asyncio.sleep(0.01)


async def test_a_router_without_workers_lives_and_is_not_ready() -> None:
    async with serving(http="127.0.0.1:0") as served, web() as session:
        assert await get(session, served, "/livez") == (200, "ok\n")
        assert await until(session, served, "/readyz", "no worker is ready\n") == 503
        assert await served.health() == SERVING
        assert await served.health(ENGINE_SERVICE) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.health("nope")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_tells_of_each_change() -> None:
    async with serving(SimOptions()) as served:
        health: Any = health_pb2_grpc.HealthStub(served.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=ENGINE_SERVICE), timeout=60)
        while (await watch.read()).status != SERVING:
            pass
        await served.workers[0].set_serving(False)
        assert (await watch.read()).status == NOT_SERVING
        await served.workers[0].set_serving(True)
        assert (await watch.read()).status == SERVING
        watch.cancel()
        strange = health.Watch(health_pb2.HealthCheckRequest(service="nope"), timeout=60)
        assert (await strange.read()).status == UNKNOWN
        strange.cancel()


async def test_everything_answers_while_every_place_is_taken() -> None:
    async with (
        serving(SimOptions(), http="127.0.0.1:0", max_concurrent=2, queue_size=2) as served,
        web() as session,
    ):
        assert await until(session, served, "/readyz", "ok\n") == 200
        calls = [served.stub.Generate(streamed("[[sim: hang]]"), timeout=60) for _ in range(4)]
        admission = served.app.admission
        await eventually(lambda: (admission.active, admission.waiting) == (2, 2))
        refused = await served.refusal(streamed("x"))
        assert refused.reason == "ADMISSION_FULL"
        # It was not looked at; its model is known all the same.
        (ended,) = served.samples("router_requests_total")
        assert (ended.labels["model"], ended.labels["reason"]) == (MODEL, "admission_full")
        assert await served.health() == SERVING
        assert await served.health(ENGINE_SERVICE) == SERVING
        assert (await get(session, served, "/livez"))[0] == 200
        assert (await get(session, served, "/readyz"))[0] == 200
        assert "router_requests_in_flight 4.0" in (await get(session, served, "/metrics"))[1]
        assert (admission.active, admission.waiting) == (2, 2)
        for call in calls:
            call.cancel()
        await served.at_rest()


async def test_ready_means_a_worker_for_each_of_the_models_that_are_needed() -> None:
    other = SimOptions(model="org/other", served_model="other", model_type="llama")
    async with (
        serving(
            SimOptions(), other, http="127.0.0.1:0", ready_models=f"{MODEL},org/other"
        ) as served,
        web() as session,
    ):
        assert await until(session, served, "/readyz", "ok\n") == 200
        assert await served.health(ENGINE_SERVICE) == SERVING
        await served.workers[1].set_serving(False)
        lacking = "no worker of org/other is ready\n"
        assert await until(session, served, "/readyz", lacking) == 503
        assert await served.health(ENGINE_SERVICE) == NOT_SERVING


async def test_liveness_asks_no_worker() -> None:
    async with serving(SimOptions(), http="127.0.0.1:0") as served, web() as session:
        await served.workers[0].stop(0)
        await eventually(lambda: not served.app.registry.routable)
        assert await get(session, served, "/livez") == (200, "ok\n")
        assert await served.health() == SERVING
