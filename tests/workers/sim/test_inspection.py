"""What tests can ask a worker: in this process as attributes, in another over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest
from aiohttp import ClientSession

from router.wire import engine
from tests.workers.sim.client import PICTURE, Client, client_of, data_url, prompt, referring
from tests.workers.sim.client import with_tensors as tensors
from workers.sim.control import Control
from workers.sim.stats import without_payloads


@asynccontextmanager
async def controlled() -> AsyncIterator[tuple[Client, ClientSession]]:
    async with client_of() as client:
        control = Control(client.worker)
        address = await control.start("127.0.0.1:0")
        try:
            async with ClientSession(f"http://{address}") as session:
                yield client, session
        finally:
            await control.stop()


async def post(session: ClientSession, path: str, body: object) -> int:
    async with session.post(path, json=body) as response:
        return response.status


async def test_calls_and_requests_are_counted() -> None:
    async with client_of() as client:
        await client.say(prompt("x"))
        await client.refusal(prompt(""))
        await client.stub.GetLoads(engine.GetLoadsRequest())
        stats = client.worker.stats
        assert stats.calls == {"Generate": 2, "GetLoads": 1}
        assert (stats.finished, stats.live) == (1, 0)
        assert stats.refused == {"INVALID_ARGUMENT": 1}


async def test_the_last_requests_can_be_read_without_their_pixels() -> None:
    async with client_of() as client:
        request = tensors(PICTURE, "tiny_28x28.jpg")
        await client.generate(request, [("x-key", "value")])
        (received,) = client.worker.stats.received
    kept = received.request
    assert ("x-key", "value") in received.metadata
    assert received.wire_bytes == request.ByteSize()
    assert not kept.mm_inputs.pixel_values.inline
    assert kept.mm_inputs.pixel_values.shape == request.mm_inputs.pixel_values.shape
    kept.mm_inputs.pixel_values.inline = request.mm_inputs.pixel_values.inline
    assert kept == request


async def test_a_copy_keeps_every_field_that_is_no_payload() -> None:
    request = referring(PICTURE, data_url("tiny_28x28.jpg"), "http://host/a?b=c")
    request.media_refs.items[0].url = "data:,short"
    request.kv_transfer_params_json = "{}"
    request.data_parallel_rank = 0
    request.stream = True
    request.sampling_params.temperature = 0.5
    assert without_payloads(request) == request


async def test_long_references_are_cut() -> None:
    request = referring(PICTURE, data_url("photo_640x480.jpg"))
    kept = without_payloads(request).media_refs.items[0].url
    assert len(kept) < 300
    assert kept.startswith("data:application/octet-stream;base64,")
    assert "sha256" in kept


async def test_extension_fields_that_reach_the_worker_are_noticed() -> None:
    request = referring(PICTURE, data_url("tiny_28x28.jpg"))
    request.router.model = "m"
    request.media_refs.items[0].hints.max_long_side_pixels = 5
    unknown = engine.GenerateRequest()
    unknown.MergeFromString(prompt("x").SerializeToString() + b"\x98\x44\x01")
    async with client_of() as client:
        await client.say(request)
        await client.say(unknown)
        await client.say(prompt("x"))
        stats = client.worker.stats
        assert [received.extensions for received in stats.received] == [
            ("router", "media_refs.items[0].hints"),
            ("1091",),
            (),
        ]
        assert stats.with_extensions == 2


async def test_http_shows_stats_and_requests() -> None:
    async with controlled() as (client, session):
        await client.say(prompt("x", "the id"))
        async with session.get("/stats") as response:
            stats = await response.json()
        async with session.get("/requests") as response:
            (received,) = await response.json()
    assert stats["calls"] == {"Generate": 1}
    assert stats["finished"] == 1
    assert received["request"]["request_id"] == "the id"


async def test_http_makes_trouble_and_ends_it() -> None:
    async with controlled() as (client, session):
        assert await post(session, "/fault", {"rule": "fail=ABORTED"}) == 200
        assert (await client.refusal(prompt("x"))).code() is grpc.StatusCode.ABORTED
        assert await post(session, "/fault", {"clear": True}) == 200
        assert await client.say(prompt("x"))


async def test_http_changes_health_capability_events_and_engine() -> None:
    async with controlled() as (client, session):
        assert await post(session, "/health", {"serving": False}) == 200
        assert not client.worker.servicer.serving
        body = {"mm_schemes": ["data"], "item_limits": {"image": 3}}
        assert await post(session, "/capability", body) == 200
        assert client.worker.options.mm_schemes == ("data",)
        assert client.worker.options.item_limit("image") == 3
        assert await post(session, "/events", {"skip": 2}) == 200
        assert client.worker.events.sequence == 2
        assert await post(session, "/engine", {"dead": True}) == 200
        assert client.worker.engine.dead is not None
        assert await post(session, "/engine", {"dead": False}) == 200
        assert await client.say(prompt("x"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/fault", {"rule": "explode"}),
        ("/fault", {"rule": 1}),
        ("/fault", []),
        ("/health", {}),
        ("/capability", {"block_size": 1}),
        ("/capability", {"nonsense": 1}),
    ],
)
async def test_http_refuses_what_it_does_not_understand(path: str, body: object) -> None:
    async with controlled() as (_, session):
        assert await post(session, path, body) == 400


@contextmanager
def process(*args: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "router", "sim", "--listen", "127.0.0.1:0", *args]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


async def test_the_command_says_where_it_listens_and_ends_with_0_when_told_to() -> None:
    with process("--model", "org/name", "--control", "127.0.0.1:0") as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert "control on http://127.0.0.1:" in running.stderr.readline()
        line = running.stdout.readline()
        assert line.startswith("listening on 127.0.0.1:")
        async with grpc.aio.insecure_channel(line.split()[-1]) as channel:
            info = channel.unary_unary(
                "/vllm.grpc.engine.VllmEngine/GetModelInfo",
                request_serializer=engine.GetModelInfoRequest.SerializeToString,
                response_deserializer=engine.GetModelInfoResponse.FromString,
            )
            assert (await info(engine.GetModelInfoRequest())).model_path == "org/name"
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0


def test_the_command_refuses_options_that_mean_nothing() -> None:
    with process("--fault", "explode") as running:
        _, errors = running.communicate(timeout=60)
        assert running.returncode == 2
    assert errors.startswith("error: ")
    assert "Traceback" not in errors


async def test_the_command_says_when_the_port_is_taken() -> None:
    async with client_of() as client:
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "sim", "--listen", client.worker.address),
            stderr=subprocess.PIPE,
        )
        _, errors = await second.communicate()
    assert second.returncode == 1
    assert b"cannot listen" in errors
    assert b"Traceback" not in errors
