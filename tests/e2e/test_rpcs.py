"""The engine's other calls, answered for a whole fleet; and health."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from typing import Any, NoReturn, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.wire import ADMIN_SERVICE, ENGINE_SERVICE, admin, common, engine
from tests.serving import (
    MODEL,
    PICTURE,
    Serving,
    data_url,
    eventually,
    nobody_at,
    refusal_of,
    seeing,
    serving,
    streamed,
    tokenized,
)
from workers.sim import SimOptions, SimWorker

SERVING, NOT_SERVING = 1, 2


async def server_info(served: Serving) -> engine.GetServerInfoResponse:
    return await served.stub.GetServerInfo(engine.GetServerInfoRequest(), timeout=10)


async def test_model_info_is_a_workers_own_with_the_shortest_context() -> None:
    async with serving(SimOptions(max_context=5000), SimOptions(max_context=4000)) as served:
        info = await served.stub.GetModelInfo(engine.GetModelInfoRequest(), timeout=10)
        assert info.served_model_name == MODEL
        assert info.model_type == "qwen3_vl"
        assert info.max_context_length == 4000
        assert info.supports_vision


@pytest.mark.parametrize("processor", ["inprocess", ""])
async def test_a_gateway_may_take_the_router_for_a_capable_worker(processor: str) -> None:
    async with serving(SimOptions(mm_processor=processor), SimOptions()) as served:
        info = await server_info(served)
        assert info.mm_processor == "router"
        assert set(info.mm_media_ref_schemes.split(",")) == {"http", "https", "data"}
        assert info.mm_device_do_normalize
        assert info.max_num_seqs == 128


async def test_a_connector_between_workers_is_the_routers_own_business() -> None:
    options = SimOptions(kv_connector="NixlConnector", kv_role="kv_both", shm_namespace_id="abc")
    async with serving(options) as served:
        info = await server_info(served)
        assert (info.kv_connector, info.kv_role, info.shm_namespace_id) == ("", "", "")


async def test_file_urls_are_offered_only_where_they_are_served(tmp_path: object) -> None:
    async with serving(SimOptions(), media_local_root=str(tmp_path)) as served:
        assert "file" in (await server_info(served)).mm_media_ref_schemes.split(",")


async def test_a_text_model_offers_no_media() -> None:
    async with serving(SimOptions(model_type="llama")) as served:
        info = await server_info(served)
        assert (info.mm_processor, info.mm_media_ref_schemes) == ("", "")


async def test_the_widest_item_limit_is_offered() -> None:
    few = SimOptions(item_limits=(("image", 2), ("video", 1)))
    async with serving(few, SimOptions(item_limits=(("image", 8),))) as served:
        # Of videos the second worker takes any number.
        assert (await server_info(served)).mm_item_limits == "image=8"


async def test_what_is_in_flight_is_shown_as_active(served: Serving) -> None:
    call = served.stub.Generate(streamed("[[sim: hang]]"), timeout=15)
    await eventually(lambda: served.worker().load.in_flight == 1)
    assert (await server_info(served)).active_requests == 1
    call.cancel()


async def test_the_tokenizer_comes_in_chunks_with_its_checksum_last(served: Serving) -> None:
    call = served.stub.GetTokenizer(common.GetTokenizerRequest(), timeout=10)
    chunks = [chunk async for chunk in call]
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {"tokenizer.json", "config.json"} <= set(archive.namelist())
    assert served.workers[0].stats.calls["GetTokenizer"] == 1, "the router has it already"


async def test_loads_have_one_entry_a_worker_and_say_what_is_known() -> None:
    async with serving(SimOptions(), SimOptions(), SimOptions()) as served:
        calls = [served.stub.Generate(streamed("[[sim: hang]]"), timeout=15) for _ in range(3)]
        await eventually(lambda: sum(w.stats.live for w in served.workers) == 3)
        served.workers[2].troubles.add("GetLoads: fail=INTERNAL")
        answer = await served.stub.GetLoads(engine.GetLoadsRequest(), timeout=10)
        assert [load.dp_rank for load in answer.loads] == [0, 1, 2]
        assert [load.num_running_reqs for load in answer.loads] == [1, 1, 1]
        assert answer.dp_rank_count == 3
        one = await served.stub.GetLoads(engine.GetLoadsRequest(dp_rank=1), timeout=10)
        assert [load.dp_rank for load in one.loads] == [1]
        for call in calls:
            call.cancel()
        await served.at_rest()


async def test_flushing_reaches_every_worker_and_says_who_did_not() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        flush = served.stub.FlushCache
        assert (await flush(common.FlushCacheRequest(), timeout=10)).success
        assert [w.stats.calls["FlushCache"] for w in served.workers] == [1, 1]
        served.workers[1].troubles.add("FlushCache: fail=INTERNAL")
        answer = await flush(common.FlushCacheRequest(), timeout=10)
        assert not answer.success
        assert served.workers[1].address in answer.message
        assert served.workers[0].address not in answer.message


ASKED = {
    "FlushCache": common.FlushCacheRequest(),
    "StartProfile": common.StartProfileRequest(),
    "GetLoads": engine.GetLoadsRequest(),
    "Abort": engine.AbortRequest(request_ids=["a"]),
}


@pytest.mark.parametrize("rpc", ["FlushCache", "StartProfile", "GetLoads", "Abort"])
async def test_a_worker_that_is_removed_meanwhile_keeps_no_caller_waiting(rpc: str) -> None:
    async with serving(SimOptions(), load_interval="1h") as served:
        sim = served.workers[0]
        running = served.stub.Generate(streamed("[[sim: hang]]", "a"), timeout=15)
        await eventually(lambda: sim.stats.live == 1)
        sim.troubles.add(f"{rpc}: hang")
        before = sim.stats.calls[rpc]
        asked = asyncio.ensure_future(getattr(served.stub, rpc)(ASKED[rpc], timeout=5))
        await eventually(lambda: sim.stats.calls[rpc] > before)
        await served.app.fleet.remove(served.worker())
        answer = await asked
        if rpc == "GetLoads":
            assert len(answer.loads) == 1
        elif rpc != "Abort":
            assert not answer.success and sim.address in answer.message
        running.cancel()


async def test_profiling_reaches_every_worker() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        start, stop = common.StartProfileRequest(), common.StopProfileRequest()
        assert (await served.stub.StartProfile(start, timeout=10)).success
        assert not (await served.stub.StartProfile(start, timeout=10)).success
        assert (await served.stub.StopProfile(stop, timeout=10)).success
        assert not (await served.stub.StopProfile(stop, timeout=10)).success


async def test_an_abort_of_many_ids_looks_for_those_that_are_here(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_for: list[str] = []
    abort = served.app.pipeline.abort

    async def noted(request_id: str) -> None:
        looked_for.append(request_id)
        await abort(request_id)

    monkeypatch.setattr(served.app.pipeline, "abort", noted)
    call = served.stub.Generate(streamed("[[sim: hang]]", "a"), timeout=30)
    await eventually(lambda: served.workers[0].stats.live == 1)
    many = [f"nobody-{i}" for i in range(10_000)]
    await served.stub.Abort(engine.AbortRequest(request_ids=[*many, "a", "a"]), timeout=30)
    assert [r.complete.finish_reason async for r in call] == ["abort"]
    assert looked_for == ["a"]


@pytest.mark.parametrize(
    ("rpc", "request_", "why"),
    [
        ("AddWorker", admin.AddWorkerRequest(address="127.0.0.1:9", role=cast(Any, 99)), "Role"),
        ("SetLogLevel", admin.SetLogLevelRequest(level=cast(Any, 99)), "LogLevel"),
    ],
)
async def test_a_command_with_a_value_that_nobody_knows_is_refused(
    served: Serving, rpc: str, request_: Any, why: str
) -> None:
    refused = await refusal_of(getattr(served.admin, rpc)(request_, timeout=10))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "99" in refused.message and why in refused.message
    assert len(served.app.registry) == 1


async def test_events_of_a_fleet_are_not_to_be_had(served: Serving) -> None:
    call = served.stub.SubscribeKvEvents(common.SubscribeKvEventsRequest(), timeout=10)
    refused = await refusal_of(call.read())
    assert refused.code is grpc.StatusCode.UNIMPLEMENTED
    assert refused.reason == "UNIMPLEMENTED"


async def test_calls_about_a_model_that_is_not_there_say_so(served: Serving) -> None:
    other = (("x-model", "nobody"),)
    for method, request in (
        ("GetModelInfo", engine.GetModelInfoRequest()),
        ("GetServerInfo", engine.GetServerInfoRequest()),
    ):
        call = getattr(served.stub, method)(request, timeout=10, metadata=other)
        assert (await refusal_of(call)).reason == "MODEL_NOT_FOUND"
    call = served.stub.GetTokenizer(common.GetTokenizerRequest(), timeout=10, metadata=other)
    assert (await refusal_of(call.read())).reason == "MODEL_NOT_FOUND"


async def test_calls_before_any_worker_is_known_are_unavailable() -> None:
    async with serving() as served:
        info = served.stub.GetModelInfo(engine.GetModelInfoRequest(), timeout=10)
        assert (await refusal_of(info)).reason == "NO_AVAILABLE_WORKER"
        tokenizer = served.stub.GetTokenizer(common.GetTokenizerRequest(), timeout=10)
        assert (await refusal_of(tokenizer.read())).reason == "NO_AVAILABLE_WORKER"
        loads = await served.stub.GetLoads(engine.GetLoadsRequest(), timeout=10)
        assert list(loads.loads) == []
        healthy = await served.stub.HealthCheck(engine.HealthCheckRequest(), timeout=10)
        assert not healthy.healthy


# -- Health


async def test_the_process_serves_before_any_worker_does() -> None:
    async with serving() as served:
        assert await served.health() == SERVING
        assert await served.health(ENGINE_SERVICE) == NOT_SERVING
        refused = await refusal_of(served.health("nope"))
        assert refused.code is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_hears_of_every_change() -> None:
    async with serving(SimOptions()) as served:
        call = health_pb2_grpc.HealthStub(served.channel).Watch(
            health_pb2.HealthCheckRequest(service=ENGINE_SERVICE), timeout=30
        )
        heard: list[int] = []

        async def listen() -> None:
            async for answer in call:
                heard.append(answer.status)  # noqa: PERF401 - read while it grows

        listening = asyncio.create_task(listen())
        await eventually(lambda: heard == [SERVING])
        await served.workers[0].set_serving(False)
        await eventually(lambda: heard == [SERVING, NOT_SERVING])
        await served.workers[0].set_serving(True)
        await eventually(lambda: heard == [SERVING, NOT_SERVING, SERVING])
        healthy = await served.stub.HealthCheck(engine.HealthCheckRequest(), timeout=10)
        assert healthy.healthy
        call.cancel()
        await asyncio.wait([listening])


async def test_reflection_names_the_services(served: Serving) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
    )
    answer = await anext(aiter(call))
    names = {service.name for service in answer.list_services_response.service}
    assert {ENGINE_SERVICE, "grpc.health.v1.Health", ADMIN_SERVICE} <= names


async def test_an_unknown_method_is_unimplemented(served: Serving) -> None:
    call = served.channel.unary_unary(f"/{ENGINE_SERVICE}/Nothing")(b"", timeout=10)
    assert (await refusal_of(call)).code is grpc.StatusCode.UNIMPLEMENTED


# -- Workers that come, and that are not ready


async def test_a_worker_whose_metadata_fail_is_pending_until_they_can_be_read() -> None:
    options = SimOptions(faults=("GetServerInfo: fail=INTERNAL",))
    async with serving(options, ready=False) as served:
        sim = served.workers[0]
        refused = await served.refusal(tokenized("x"))
        assert refused.reason == "NO_AVAILABLE_WORKER"
        assert refused.about == {"registered": "1", "pending": "1"}
        assert sim.stats.calls["Generate"] == 0
        await eventually(lambda: sim.stats.calls["GetServerInfo"] >= 3)
        assert served.worker().state.value == "pending"
        sim.troubles.clear()
        await served.ready()
        await served.generate(tokenized("x"))


async def test_a_worker_that_does_not_serve_yet_gets_nothing() -> None:
    async with serving(SimOptions(warmup=3600), SimOptions(), ready=False) as served:
        await eventually(lambda: served.worker(1).state.value == "ready")
        for _ in range(4):
            await served.generate(tokenized("x"))
        assert served.workers[0].stats.calls["Generate"] == 0
        await served.workers[0].set_serving(True)
        await served.ready()
        for _ in range(2):
            await served.generate(tokenized("x"))
        assert served.workers[0].stats.calls["Generate"] == 1


async def test_dead_addresses_at_the_start_do_not_keep_the_router_down() -> None:
    with nobody_at(2) as dead:
        async with serving(*dead, ready=False) as served:
            assert await served.health() == SERVING
            assert await served.health(ENGINE_SERVICE) == NOT_SERVING
            listed = await served.admin.ListWorkers(admin.ListWorkersRequest(), timeout=10)
            assert [w.state for w in listed.workers] == [admin.PENDING, admin.PENDING]
            assert all(w.reason for w in listed.workers)
            late = SimWorker(SimOptions())
            await late.start(dead[1])
            try:
                await eventually(lambda: served.app.registry.routable)
                watch = health_pb2_grpc.HealthStub(served.channel).Watch(
                    health_pb2.HealthCheckRequest(service=ENGINE_SERVICE), timeout=10
                )
                assert SERVING in [answer.status async for answer in _until(watch, SERVING)]
                await served.generate(tokenized("x"))
            finally:
                await late.stop(0)


async def _until(watch: Any, status: int) -> AsyncIterator[Any]:
    """The answers of a Watch up to the first with `status`."""
    async for answer in watch:
        yield answer
        if answer.status == status:
            watch.cancel()
            return


async def test_a_worker_that_comes_back_without_a_processor_gets_no_references() -> None:
    async with serving(SimOptions(), metadata_interval="1h") as served:
        request = seeing(PICTURE, data_url("solid_61x43.bmp"))
        assert (await served.route(request))["mode"] == "worker"
        address = served.workers[0].address
        await served.workers[0].stop(0)
        other = SimWorker(SimOptions(mm_processor=""))
        await other.start(address)
        try:

            def known() -> bool:
                now = served.app.registry.get(address)
                return (
                    now is not None
                    and now.state.value == "ready"
                    and now.capability is not None
                    and not now.capability.takes_media_refs
                )

            await eventually(known)
            route = await served.route(request)
            assert (route["mode"], route["reason"]) == ("router", "auto_none")
            assert not any(r.request.HasField("media_refs") for r in other.stats.received)
        finally:
            await other.stop(0)


# -- Operators


async def test_workers_are_added_drained_and_removed_by_command() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        first, second = (w.address for w in served.workers)
        drain = served.admin.DrainWorker
        call = served.stub.Generate(streamed("[[sim: hang-after-chunks=2]]", "a"), timeout=15)
        await anext(aiter(call))
        busy = next(w.address for w in served.app.registry if w.load.in_flight)
        shown = await drain(admin.DrainWorkerRequest(address=busy), timeout=10)
        assert shown.worker.state == admin.DRAINING
        for _ in range(3):
            assert (await served.route(tokenized("x")))["worker"] == (
                {first, second} - {busy}
            ).pop()
        # What runs there is left to end by itself.
        await served.stub.Abort(engine.AbortRequest(request_ids=["a"]), timeout=10)
        assert [r async for r in call][-1].complete.finish_reason == "abort"
        await eventually(lambda: served.app.registry.get(busy) is None)
        added = await served.admin.AddWorker(
            admin.AddWorkerRequest(address=f"grpc://{busy}", labels={"zone": "a"}), timeout=10
        )
        assert (added.worker.state, added.worker.labels["zone"]) == (admin.PENDING, "a")
        again = served.admin.AddWorker(admin.AddWorkerRequest(address=busy), timeout=10)
        assert (await refusal_of(again)).code is grpc.StatusCode.ALREADY_EXISTS
        await served.ready()
        await served.admin.RemoveWorker(admin.RemoveWorkerRequest(address=busy), timeout=10)
        gone = served.admin.RemoveWorker(admin.RemoveWorkerRequest(address=busy), timeout=10)
        assert (await refusal_of(gone)).code is grpc.StatusCode.NOT_FOUND
        bad = served.admin.AddWorker(admin.AddWorkerRequest(address="nowhere"), timeout=10)
        assert (await refusal_of(bad)).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_explain_says_what_would_happen_and_asks_no_worker_to_generate() -> None:
    async with serving(SimOptions(), SimOptions(mm_schemes=("https",))) as served:
        request = seeing(f"{PICTURE}What is it?", data_url("photo_640x480.jpg"))
        explained = await served.admin.Explain(admin.ExplainRequest(request=request), timeout=15)
        assert (explained.mode, explained.reason) == ("worker", "auto_uniform")
        assert explained.picked == served.workers[0].address
        assert [w.cause for w in explained.workers] == ["", "scheme_not_accepted"]
        assert (explained.items[0].width, explained.items[0].height) == (640, 480)
        assert explained.estimated_tokens > 300
        assert explained.prompt_tokens == len(request.tokenized.input_ids)
        assert sum(w.stats.calls["Generate"] for w in served.workers) == 0
        assert served.outcomes() == {}
        said = await served.generate(request)
        assert said[-1].complete.prompt_tokens == explained.estimated_tokens


async def test_operators_calls_are_off_where_others_could_reach_them() -> None:
    async with serving(SimOptions(), listen="0.0.0.0:0") as served:
        call = served.admin.ListWorkers(admin.ListWorkersRequest(), timeout=10)
        assert (await refusal_of(call)).code is grpc.StatusCode.UNIMPLEMENTED


async def test_numbers_that_no_field_holds_do_not_spoil_the_answer_for_a_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 2**31 - 1

    async def loads(*_: object) -> engine.GetLoadsResponse:
        ranks = [engine.SchedulerLoad(num_running_reqs=n, gen_throughput=1.5) for n in (most, most)]
        return engine.GetLoadsResponse(loads=ranks)

    monkeypatch.setattr("workers.sim.servicer.SimServicer.GetLoads", loads)
    options = SimOptions(max_num_seqs=most)
    async with serving(options, options) as served:
        assert (await server_info(served)).max_num_seqs == most
        answer = await served.stub.GetLoads(engine.GetLoadsRequest(), timeout=10)
        assert [x.num_running_reqs for x in answer.loads] == [most, most]
        assert [x.gen_throughput for x in answer.loads] == [3.0, 3.0]
        listed = await served.admin.ListWorkers(admin.ListWorkersRequest(), timeout=10)
        assert [w.capability.max_num_seqs for w in listed.workers] == [most, most]


async def test_a_fault_of_the_routers_own_is_not_told_in_pythons_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> NoReturn:
        raise RuntimeError("SECRET")

    async with serving(SimOptions()) as served:
        monkeypatch.setattr("router.rpc.admin.show_worker", broken)
        call = served.admin.ListWorkers(admin.ListWorkersRequest(), timeout=10)
        refused = await refusal_of(call)
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert "SECRET" not in refused.message
