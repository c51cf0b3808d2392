"""Pictures from elsewhere: how often they are fetched, by whom, and what is told of them."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import pytest

from router.faults import Fault, Reason
from router.request.tensors_out import Loaded, Recipe, TensorMaker
from router.wire import common
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from tests.media.server import fixed, running
from tests.serving import (
    PICTURE,
    data_url,
    eventually,
    image,
    refusal_of,
    seeing,
    serving,
    streamed,
    tokenized,
)
from tests.workers.sim.client import with_tensors
from workers.sim import SimOptions, SimWorker
from workers.sim.tokenizer import encode

TENSORS_ONLY = SimOptions(mm_processor="")


async def test_a_picture_on_the_web_gives_the_same_answer_in_both_modes() -> None:
    async with (
        running() as host,
        serving(TENSORS_ONLY, media_allow_private_hosts=True) as router,
        serving(SimOptions(), media_allow_private_hosts=True) as worker,
    ):
        host.routes["/photo.jpg"] = fixed(image("photo_640x480.jpg"))
        request = seeing(f"{PICTURE}Look.", host.url("/photo.jpg?sig=1"))
        here = await router.say(request)
        assert len(host.requests) == 1
        there = await worker.say(request)
        assert len(host.requests) == 2, "the worker fetches it, and the router does not"
        assert here == there
        (received,) = worker.workers[0].stats.received
        assert received.request.media_refs.items[0].url == host.url("/photo.jpg?sig=1")


async def test_what_a_worker_could_not_read_is_named_by_its_index() -> None:
    async with (
        running() as host,
        serving(SimOptions(), media_allow_private_hosts=True) as served,
    ):
        host.routes["/403"] = fixed(b"", status="403 Forbidden")
        gone = await served.refusal(seeing(PICTURE, host.url("/403")))
        assert gone.reason == "MEDIA_NOT_FOUND"
        assert gone.about == {"index": "0", "http_status": "403"}
        assert gone.message == "media item 0: its host answered 403"
        # Of several the worker does not say which.
        one = await served.refusal(
            seeing(PICTURE * 2, data_url("photo_640x480.jpg"), host.url("/403"))
        )
        assert one.reason == "MEDIA_NOT_FOUND"
        assert one.about == {"http_status": "403"}
        torn = await served.refusal(seeing(PICTURE, data_url("photo_640x480.jpg")[:-2000]))
        assert (torn.reason, torn.about) == ("MEDIA_DECODE_FAILED", {"index": "0"})


async def test_a_picture_on_another_background_has_another_identity() -> None:
    hashes: dict[str, list[str]] = {"": [], "#102030": []}
    for background, seen in hashes.items():
        settings = {"media_background": background} if background else {}
        async with serving(TENSORS_ONLY, **settings) as served:
            for name in ("rgba_203x151.png", "photo_640x480.jpg"):
                await served.say(seeing(PICTURE, data_url(name)))
            seen += [one.request.mm_inputs.mm_hashes[0] for one in served.workers[0].stats.received]
    white, coloured = hashes.values()
    assert white[0] != coloured[0]
    assert white[1] == coloured[1]


async def test_a_request_fetches_its_picture_once_whatever_its_workers_do() -> None:
    options = SimOptions(mm_processor="", faults=("1*fail=UNAVAILABLE",))
    async with (
        running() as host,
        serving(options, options, media_allow_private_hosts=True, media_cache_bytes=0) as served,
    ):
        host.routes["/photo.jpg"] = fixed(image("photo_640x480.jpg"))
        url = host.url("/photo.jpg")
        await served.generate(seeing(PICTURE * 2, url, url))
        assert sum(w.stats.calls["Generate"] for w in served.workers) == 3
        assert len(host.requests) == 1


async def test_a_request_that_no_worker_can_have_fetches_nothing() -> None:
    async with (
        running() as host,
        serving(TENSORS_ONLY, media_allow_private_hosts=True, retry_max_attempts=1) as served,
    ):
        host.routes["/photo.jpg"] = fixed(image("photo_640x480.jpg"))
        await served.workers[0].set_serving(False)
        await eventually(lambda: not served.app.registry.routable)
        refused = await served.refusal(seeing(PICTURE, host.url("/photo.jpg")))
        assert refused.reason == "NO_AVAILABLE_WORKER"
        assert host.connections == 0


async def test_as_many_pictures_as_the_workers_take_are_taken() -> None:
    for processor in ("", "inprocess"):
        options = SimOptions(mm_processor=processor, item_limits=(("image", 128),))
        async with serving(options) as served:
            said = await served.say(seeing(PICTURE * 100, *[data_url("solid_61x43.bmp")] * 100))
            assert "100 images" in said


async def test_a_full_hd_picture_fits_a_message_as_floats() -> None:
    options = SimOptions(mm_processor="", device_normalize=False, encoder_dtype="float32")
    async with serving(options) as served:
        await served.generate(seeing(PICTURE, data_url("photo_1920x1080.jpg")))
        (received,) = served.workers[0].stats.received
        assert received.request.mm_inputs.pixel_values.dtype == "float32"
        assert received.wire_bytes > 20_000_000


async def test_media_budget_and_tensors_are_let_go_at_the_first_output() -> None:
    async with serving(TENSORS_ONLY, media_cache_bytes=0) as served:
        budget = served.app._intake.budget
        request = seeing(f"[[sim: hang-after-chunks=1]]{PICTURE}", data_url("photo_640x480.jpg"))
        request.stream = True
        call = served.stub.Generate(request, timeout=15)
        await anext(aiter(call))
        await eventually(lambda: budget.used.nbytes == 0)
        assert served.worker().load.in_flight == 1
        call.cancel()
        await served.at_rest()


async def test_no_line_of_the_log_holds_a_secret_or_a_picture() -> None:
    sim = SimWorker(TENSORS_ONLY)
    await sim.start("127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "serve", "--listen", "127.0.0.1:0", "--http", ""),
        *("--worker", sim.address, "--log-level", "debug", "--media-allow-private-hosts"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        async with asyncio.timeout(60):
            address = (await process.stdout.readline()).decode().split()[-1]
        async with running() as host, grpc.aio.insecure_channel(address) as channel:
            host.routes["/404"] = fixed(b"SECRET-BODY", status="404 Not Found")
            stub = VllmEngineStub(channel)

            async def refused(request: object) -> str:
                async def call() -> None:
                    async for _ in stub.Generate(request, timeout=30, wait_for_ready=True):
                        pass

                return (await refusal_of(call())).reason

            while await refused(seeing(PICTURE, host.url("/404"))) == "NO_AVAILABLE_WORKER":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            broken = "data:image/png;base64," + "U0VDUkVU" * 300_000
            inline = tokenized(PICTURE)
            inline.media_refs.items.add(modality=common.IMAGE, data=b"SECRET" * 100_000)
            reasons = [
                await refused(request)
                for request in (
                    seeing(PICTURE, host.url("/404?token=SECRET#SECRET")),
                    seeing(PICTURE, "https://u:SECRET@example.com/x.jpg?token=SECRET"),
                    seeing(PICTURE, "http://127.0.0.1:1/SECRET.png?token=SECRET"),
                    seeing(PICTURE, broken),
                    inline,
                    seeing(PICTURE, "SECRET" * 10_000),
                    seeing(PICTURE, "file:///SECRET"),
                    streamed("[[sim: fail=INTERNAL]] SECRET"),
                )
            ]
            assert "" not in reasons and "INTERNAL" not in reasons
        process.terminate()
        log = await process.stderr.read()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await sim.stop(0)
    assert log.count(b'"outcome"') >= 9
    assert b"SECRET" not in log and b"U0VDUkVU" not in log
    assert max(map(len, log.splitlines())) < 2048


async def test_tensors_of_clients_are_in_the_budget_until_their_first_output() -> None:
    asked = with_tensors(f"{PICTURE}Look.", "photo_640x480.jpg")
    waiting = with_tensors(f"[[sim: hang]]{PICTURE}", "photo_640x480.jpg")
    settings = {"media_budget_bytes": 3 * asked.ByteSize(), "media_budget_wait": "50ms"}
    async with serving(SimOptions(), media_request_bytes="1GiB", **settings) as served:
        used = "router_media_budget_used_bytes"
        call = served.stub.Generate(waiting, timeout=60)
        await eventually(lambda: served.workers[0].stats.live == 1)
        assert served.metric(used) == waiting.ByteSize()
        assert (await served.refusal(asked)).reason == "MEDIA_BUDGET_FULL"
        # A text takes nothing of it.
        await served.say(tokenized("x"))
        call.cancel()
        await served.at_rest()
        assert served.metric(used) == 0
        asked.stream = True
        asked.tokenized.input_ids.extend(encode("[[sim: hang-after-chunks=1]]"))
        call = served.stub.Generate(asked, timeout=60)
        await call.read()
        await eventually(lambda: served.metric(used) == 0)
        assert served.worker().load.in_flight == 1
        call.cancel()
        await served.at_rest()


async def test_tensors_of_a_client_that_no_budget_could_hold_are_refused_for_good() -> None:
    asked = with_tensors(PICTURE, "photo_640x480.jpg")
    async with serving(SimOptions(), media_request_bytes=asked.ByteSize() - 1) as served:
        refused = await served.refusal(asked)
        assert refused.reason == "MEDIA_TOO_LARGE"
        assert refused.about["size"] == str(asked.ByteSize())
        assert served.workers[0].stats.calls["Generate"] == 0


async def test_a_picture_that_fails_for_several_requests_has_the_index_it_has_in_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, go_on = TensorMaker._make, asyncio.Event()

    async def failing(self: TensorMaker, loaded: Loaded, recipe: Recipe) -> Any:
        if loaded.plan.source_width != 61:
            return await make(self, loaded, recipe)
        await go_on.wait()
        raise Fault.of_item(Reason.MEDIA_DECODE_FAILED, loaded.plan.index, "it is broken")

    monkeypatch.setattr(TensorMaker, "_make", failing)
    broken, sound = data_url("solid_61x43.bmp"), data_url("photo_640x480.jpg")
    async with serving(TENSORS_ONLY) as served:
        flights = served.app._intake.contents._flights._flights
        first = asyncio.create_task(served.refusal(seeing(PICTURE, broken)))
        await eventually(lambda: [flight.waiters for flight in flights.values()] == [1])
        second = asyncio.create_task(served.refusal(seeing(PICTURE * 2, sound, broken)))
        await eventually(lambda: [flight.waiters for flight in flights.values()] == [2])
        go_on.set()
        for refused, index in ((await first, "0"), (await second, "1")):
            assert refused.about["index"] == index
            assert f"media item {index}: it is broken" in refused.message
