"""The commands, each in a process of its own, against a whole router."""

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.wire import ENGINE_SERVICE
from tests.serving import IMAGES, eventually, serving
from workers.sim import SimOptions

TENSORS_ONLY = SimOptions(mm_processor="")
PHOTO = str(IMAGES / "photo_640x480.jpg")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


async def mmrouter(*args: str) -> Result:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "router", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Result(process.returncode, out.decode(), err.decode())


async def until_serving(channel: grpc.aio.Channel) -> None:
    """Waits until requests can be routed, which the first compilation of kernels delays."""
    request = health_pb2.HealthCheckRequest(service=ENGINE_SERVICE)
    stub: Any = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(request, timeout=60)
    async for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            break
    watch.cancel()


async def test_health_tells_a_router_with_workers_from_one_without() -> None:
    async with serving(SimOptions()) as served:
        patience = ("--connect-timeout", "30s", "--rpc-timeout", "30s")
        probe = ("health", "--addr", served.app.listen, *patience)
        await until_serving(served.channel)
        assert (await mmrouter(*probe, "--service", ENGINE_SERVICE)).code == 0
        await served.workers[0].stop(0)
        await eventually(lambda: not served.app.registry.routable)
        assert (await mmrouter(*probe)).code == 0
        assert (await mmrouter(*probe, "--service", ENGINE_SERVICE)).code == 4


@pytest.mark.parametrize(
    ("worker", "mode", "reason"),
    [(TENSORS_ONLY, "router", "auto_none"), (SimOptions(), "worker", "auto_uniform")],
)
async def test_generate_tells_where_a_photo_was_processed(
    worker: SimOptions, mode: str, reason: str
) -> None:
    async with serving(worker) as served:
        answer = await mmrouter(
            *("generate", "--addr", served.app.listen, "--image", PHOTO, "--json", "What?")
        )
        address = served.workers[0].address
    assert answer.code == 0, answer.err
    printed = json.loads(answer.out)
    assert "640x480" in printed["text"]
    assert printed["route"] == {
        "request-id": printed["request_id"],
        "mode": mode,
        "reason": reason,
        "worker": address,
        "attempts": "1",
    }


@pytest.mark.parametrize("extra", [("--inline",), ("--max-long-side", "320")])
async def test_what_only_the_router_can_do_is_done_in_the_router(extra: tuple[str, ...]) -> None:
    async with serving(SimOptions()) as served:
        answer = await mmrouter(
            *("generate", "--addr", served.app.listen, "--image", PHOTO, *extra, "--json", "What?")
        )
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["route"]["reason"] == "plan_not_forwardable"


async def test_the_router_s_reason_is_what_a_failure_prints() -> None:
    async with serving(SimOptions()) as served:
        addr = ("--addr", served.app.listen)
        forbidden = await mmrouter("generate", *addr, "--image", "http://127.0.0.1:1/a.png", "x")
        unknown = await mmrouter("generate", *addr, "--model", "nobody", "x")
    assert forbidden.code == unknown.code == 1
    assert forbidden.err.startswith("error: MEDIA_HOST_FORBIDDEN: media item 0: ")
    assert unknown.err.startswith("error: MODEL_NOT_FOUND: ")


async def test_explain_plans_and_sends_nothing() -> None:
    async with serving(TENSORS_ONLY) as served:
        plan = await mmrouter("explain", "--addr", served.app.listen, "--image", PHOTO, "What?")
        assert not served.workers[0].stats.received
        address = served.workers[0].address
    assert plan.code == 0, plan.err
    assert "media in  router (auto_none)" in plan.out
    assert f"picked    {address}" in plan.out
    assert "640x480" in plan.out


async def test_a_worker_can_be_drained_and_added_again() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        addr = ("--addr", served.app.listen)
        first, second = (worker.address for worker in served.workers)
        assert (await mmrouter("workers", "drain", first, *addr)).code == 0
        await eventually(lambda: served.app.registry.get(first) is None)
        listed = json.loads((await mmrouter("workers", "list", *addr, "--json")).out)
        assert [worker["address"] for worker in listed] == [second]
        assert (await mmrouter("workers", "add", first, *addr)).code == 0
        await served.ready()
        table = (await mmrouter("workers", "list", *addr)).out
    assert table.count(" ready ") == 2
    assert first in table
