"""Workers that fail: who is asked next, what the client hears, what the breaker learns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from router.wire import engine
from tests.serving import (
    MODEL,
    PICTURE,
    Refusal,
    chunk_ids,
    completes,
    data_url,
    eventually,
    refusal_of,
    seeing,
    serving,
    streamed,
    tokenized,
)
from workers.sim import SimOptions, SimWorker


async def test_another_worker_answers_when_the_first_fails_before_its_output() -> None:
    async with serving(SimOptions(faults=("fail=UNAVAILABLE",)), SimOptions()) as served:
        for _ in range(4):
            route = await served.route(tokenized("x"))
            assert route["worker"] == served.workers[1].address
        assert served.outcomes() == {("ok", ""): 4}
        assert served.workers[0].stats.calls["Generate"] >= 2
        await served.at_rest()


async def test_a_worker_is_asked_again_only_when_no_other_is_left() -> None:
    async with serving(
        SimOptions(faults=("1*fail=UNAVAILABLE",)), SimOptions(faults=("1*fail=UNAVAILABLE",))
    ) as served:
        route = await served.route(tokenized("x"))
        assert route["attempts"] == "3"
        assert sorted(w.stats.calls["Generate"] for w in served.workers) == [1, 2]


async def test_no_more_attempts_are_made_than_are_allowed() -> None:
    options = SimOptions(faults=("fail=UNAVAILABLE",))
    async with serving(options, options, retry_max_attempts=2) as served:
        refused = await served.refusal(tokenized("x"))
        assert refused.reason == "WORKER_UNAVAILABLE"
        assert refused.route["attempts"] == "2"
        assert sum(w.stats.calls["Generate"] for w in served.workers) == 2


async def test_an_internal_error_is_tried_once_more_and_no_more() -> None:
    options = SimOptions(faults=("fail=INTERNAL",))
    async with serving(options, options, options) as served:
        refused = await served.refusal(tokenized("x"))
        assert refused.reason == "WORKER_INTERNAL"
        assert sum(w.stats.calls["Generate"] for w in served.workers) == 2


async def test_nothing_is_tried_again_after_the_first_output() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        refused = await served.refusal(streamed("[[sim: fail-after-chunks=2]]"))
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert refused.reason == "WORKER_STREAM_BROKEN"
        assert refused.retry_after is None
        assert sum(w.stats.calls["Generate"] for w in served.workers) == 1


@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND"])
async def test_client_faults_pass_through_and_never_open_a_breaker(status: str) -> None:
    async with serving(SimOptions(), SimOptions(), breaker_min_calls=2) as served:
        for _ in range(20):
            refused = await served.refusal(tokenized(f"[[sim: fail={status}]]"))
            assert refused.code.name == status
            assert refused.message == "This call fails as was asked for."
            assert refused.reason == ""
            assert refused.route["attempts"] == "1"
        assert {w.breaker.state.value for w in served.app.registry} == {"closed"}
        await served.at_rest()
        assert served.outcomes() == {("client_fault", "worker_refused"): 20}


async def test_enough_failures_open_the_breaker_and_a_probe_closes_it() -> None:
    async with serving(
        SimOptions(),
        breaker_min_calls=3,
        breaker_open_for="1h",
        retry_max_attempts=1,
        worker_wait=0,
    ) as served:
        for _ in range(3):
            assert (await served.refusal(tokenized("[[sim: fail]]"))).code.name == "UNAVAILABLE"
        await served.at_rest()
        assert served.worker().breaker.state.value == "open"
        calls = served.workers[0].stats.calls["Generate"]
        refused = await served.refusal(tokenized("x"))
        assert refused.reason == "NO_AVAILABLE_WORKER"
        assert refused.about["breaker_open"] == "1"
        assert refused.retry_after is not None
        assert served.workers[0].stats.calls["Generate"] == calls
        served.let_breaker_rest()
        assert served.worker().breaker.state.value == "half_open"
        await served.generate(tokenized("x"))
        assert served.worker().breaker.state.value == "closed"


async def test_a_worker_whose_engine_has_died_is_found_out_by_the_call_that_fails() -> None:
    # No check is due for an hour, and no breaker opens.
    async with serving(
        SimOptions(), SimOptions(), health_interval="1h", breaker_min_calls=1000
    ) as served:
        served.workers[0].engine.die("as was asked for")
        calls = served.workers[0].stats.calls
        while not calls["Generate"]:
            await served.generate(tokenized("x"))
        await eventually(lambda: served.worker(0).state.value == "unhealthy")
        assert served.worker(0).state_reason == "health: NOT_SERVING"
        for _ in range(3):
            await served.generate(tokenized("x"))
        assert calls["Generate"] == 1


async def test_a_half_open_worker_gets_one_probe_at_a_time() -> None:
    async with serving(
        SimOptions(), breaker_min_calls=1, breaker_open_for="1h", retry_max_attempts=1
    ) as served:
        worker = served.workers[0]
        await served.refusal(tokenized("[[sim: fail]]"))
        await served.at_rest()
        served.let_breaker_rest()
        assert served.worker().breaker.state.value == "half_open"
        probe = served.stub.Generate(streamed("[[sim: hang]]"), timeout=15)
        await eventually(lambda: worker.stats.live == 1)
        refusals = await asyncio.gather(*(served.refusal(tokenized("x")) for _ in range(10)))
        assert {r.reason for r in refusals} == {"NO_AVAILABLE_WORKER"}
        assert worker.stats.live == 1
        # A probe that its client cancels says nothing, and makes room for the next.
        probe.cancel()
        await served.at_rest()
        await served.generate(tokenized("x"))
        assert served.worker().breaker.state.value == "closed"


async def test_a_long_answer_to_a_probe_keeps_nobody_from_the_worker() -> None:
    async with serving(
        SimOptions(), breaker_min_calls=1, breaker_open_for="1h", retry_max_attempts=1
    ) as served:
        await served.refusal(tokenized("[[sim: fail]]"))
        await served.at_rest()
        served.let_breaker_rest()
        probe = served.stub.Generate(streamed("[[sim: hang-after-chunks=1]]"), timeout=60)
        await probe.read()
        await served.generate(tokenized("x"))
        assert served.worker().breaker.state.value == "closed"
        probe.cancel()
        await served.at_rest()


async def test_a_failing_fleet_is_not_asked_much_more_than_clients_ask() -> None:
    options = SimOptions(faults=("fail=UNAVAILABLE",))
    async with serving(options, options, options, breaker_min_calls=100_000) as served:
        for _ in range(100):
            await served.refusal(tokenized("x"))
        assert 100 < sum(w.stats.calls["Generate"] for w in served.workers) <= 120


async def test_saturation_is_not_ill_health() -> None:
    options = SimOptions(faults=("saturate",))
    async with serving(options, SimOptions(), breaker_min_calls=1) as served:
        for _ in range(4):
            await served.generate(tokenized("x"))
        assert served.worker(0).breaker.state.value == "closed"
    async with serving(options, breaker_min_calls=1) as served:
        refused = await served.refusal(tokenized("x"))
        assert refused.reason == "WORKER_SATURATED"
        assert refused.retry_after is not None
        assert served.worker().breaker.state.value == "closed"


async def test_a_worker_may_forbid_a_retry_by_its_pushback() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        for worker in served.workers:
            worker.troubles.add("fail, pushback=30s")
        # Longer than the client waits: there is no use in another attempt.
        refused = await served.refusal(tokenized("x"), timeout=20)
        assert refused.reason == "WORKER_UNAVAILABLE"
        assert refused.route["attempts"] == "1"


async def test_a_stream_that_ends_without_a_complete_is_broken() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        refused = await served.refusal(streamed("[[sim: end-without-complete]]"))
        assert refused.reason == "WORKER_STREAM_BROKEN"
        # Without a stream nothing has gone out, so another worker may answer.
        served.workers[0].troubles.add("end-without-complete")
        for _ in range(2):
            assert completes(await served.generate(tokenized("x")))


@pytest.mark.parametrize("status", ["CANCELLED", "ABORTED", "UNKNOWN", "DATA_LOSS"])
async def test_a_call_that_the_worker_itself_ends_is_not_the_clients_cancel(status: str) -> None:
    async with serving(SimOptions(faults=(f"fail={status}",)), SimOptions()) as served:
        for _ in range(2):
            await served.generate(tokenized("x"))
        assert served.outcomes() == {("ok", ""): 2}


async def test_a_silent_worker_is_given_up_for_another() -> None:
    async with serving(
        SimOptions(faults=("hang",)), SimOptions(), first_output_timeout="1s"
    ) as served:
        for _ in range(2):
            await served.generate(tokenized("x"))
        await served.at_rest()
        assert served.workers[0].stats.cancelled >= 1
        assert served.outcomes() == {("ok", ""): 2}


async def test_a_stream_that_falls_silent_is_ended() -> None:
    async with serving(SimOptions(), idle_timeout="200ms", breaker_min_calls=1) as served:
        refused = await served.refusal(streamed("[[sim: hang-after-chunks=2]]"))
        assert refused.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert refused.reason == "WORKER_TIMEOUT"
        assert refused.about["limit"] == "idle"
        await served.at_rest()
        assert served.worker().breaker.state.value == "open"


async def test_the_longest_life_of_a_request_is_no_failure_of_its_worker() -> None:
    async with serving(SimOptions(), request_timeout="300ms", breaker_min_calls=1) as served:
        for directive in ("hang", "hang-after-chunks=2"):
            call = served.stub.Generate(streamed(f"[[sim: {directive}]]"))
            refused = await refusal_of(_drained(call))
            assert refused.code is grpc.StatusCode.DEADLINE_EXCEEDED, directive
            assert refused.reason == "WORKER_TIMEOUT"
            assert refused.about["limit"] == "total"
        await served.at_rest()
        assert served.worker().breaker.state.value == "closed"


async def _drained(call: grpc.aio.UnaryStreamCall[object, object]) -> None:
    async for _ in call:
        pass


async def test_a_worker_that_lost_its_capability_gets_no_more_references() -> None:
    async with serving(SimOptions(), SimOptions(), metadata_interval="1h") as served:
        changed, other = served.workers
        changed.change(mm_processor="")
        changed.troubles.add("1*constraint-failed")
        request = seeing(PICTURE, data_url("solid_61x43.bmp"))
        route = await served.route(request)
        assert (route["mode"], route["worker"]) == ("worker", other.address)
        await eventually(lambda: not served.worker(0).capability.takes_media_refs)  # type: ignore[union-attr]
        assert (await served.route(request))["reason"] == "auto_mixed"


async def test_a_retry_asks_for_the_schemes_of_the_request_again() -> None:
    first = SimOptions(faults=("fail=UNAVAILABLE",))
    second = SimOptions(mm_schemes=("http", "https"))
    async with serving(first, second) as served:
        refused = await served.refusal(seeing(PICTURE, data_url("solid_61x43.bmp")))
        assert served.workers[1].stats.calls["Generate"] == 0
        assert refused.reason == "WORKER_UNAVAILABLE"


async def test_references_stay_references_and_pixels_stay_pixels_on_a_retry() -> None:
    for processor, field in (("inprocess", "media_refs"), ("", "mm_inputs")):
        options = SimOptions(mm_processor=processor, faults=("1*fail=UNAVAILABLE",))
        async with serving(options, options) as served:
            served.workers[1].troubles.clear()
            await served.generate(seeing(PICTURE, data_url("palette_203x151.png")))
            received = [r.request for w in served.workers for r in w.stats.received]
            assert len(received) == 2
            assert all(r.HasField(field) for r in received)
            for request in received:
                request.ClearField("request_id")
            assert received[0] == received[1]


async def test_a_worker_that_fails_with_a_data_reference_failed_by_itself() -> None:
    """Nothing had to be fetched, so its UNAVAILABLE is its own."""
    async with serving(SimOptions(), breaker_min_calls=1, retry_max_attempts=1) as served:
        request = seeing(f"[[sim: fail=UNAVAILABLE]]{PICTURE}", data_url("solid_61x43.bmp"))
        await served.refusal(request)
        await served.at_rest()
        assert served.worker().breaker.state.value == "open"


async def test_removing_a_worker_ends_its_streams_as_broken() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        call = served.stub.Generate(streamed("[[sim: hang-after-chunks=2]]"), timeout=15)
        await anext(aiter(call))
        worker = next(w for w in served.app.registry if w.load.in_flight)
        await served.app.fleet.remove(worker)
        refused = await refusal_of(_drained(call))
        assert refused.reason == "WORKER_STREAM_BROKEN"
        # A client hears of its end a moment before it is counted.
        await served.at_rest()
        assert served.outcomes() == {("worker_failed", "worker_stream_broken"): 1}


async def test_removing_a_worker_before_its_output_sends_the_request_elsewhere() -> None:
    async with serving(SimOptions(faults=("hang",)), SimOptions()) as served:
        calls = [asyncio.create_task(served.generate(tokenized("x"))) for _ in range(2)]
        await eventually(lambda: served.workers[0].stats.live == 1)
        await served.app.fleet.remove(served.worker(0))
        for call in calls:
            assert completes(await call)
        assert served.outcomes() == {("ok", ""): 2}


async def test_removing_a_worker_that_embeds_sends_the_request_elsewhere() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        served.workers[0].troubles.add("Embed: hang")
        request = engine.EmbedRequest(tokenized=engine.TokenizedInput(input_ids=[1]))
        calls = [served.stub.Embed(request, timeout=15) for _ in range(2)]
        await eventually(lambda: served.worker(0).load.in_flight == 1)
        await eventually(lambda: served.workers[0].stats.calls["Embed"] == 1)
        await served.app.fleet.remove(served.worker(0))
        assert all([(await call).embedding for call in calls])


async def test_a_worker_back_at_its_address_begins_with_no_load() -> None:
    async with serving(SimOptions()) as served:
        call = served.stub.Generate(streamed("[[sim: hang-after-chunks=2]]"), timeout=15)
        await anext(aiter(call))
        old, address = served.worker(), served.workers[0].address
        in_flight: list[float] = []

        def note() -> None:
            in_flight.append(served.metric("router_worker_in_flight", worker=address))

        await served.app.fleet.remove(old)
        new = served.app.fleet.add(address)
        note()
        assert new.generation > old.generation
        await served.at_rest()
        note()
        await served.ready()
        assert (new.load.in_flight, new.load.reserved_tokens) == (0, 0)
        assert old.load.in_flight == 0
        await served.generate(tokenized("x"))
        note()
        assert set(in_flight) == {0.0}
        call.cancel()


async def test_a_frozen_worker_does_not_hold_up_the_others() -> None:
    async with serving(SimOptions(faults=("hang",)), SimOptions()) as served:
        stuck = [served.stub.Generate(tokenized("x"), timeout=15) for _ in range(4)]
        await eventually(lambda: served.workers[0].stats.live == 2)
        await served.workers[0].set_serving(False)
        await eventually(lambda: served.worker(0).state.value == "unhealthy")
        for _ in range(5):
            await served.generate(tokenized("x"), timeout=5)
        for call in stuck:
            call.cancel()
        await served.at_rest()


async def test_a_request_waits_for_a_worker_that_is_about_to_come_back() -> None:
    async with serving(
        SimOptions(),
        breaker_min_calls=3,
        breaker_open_for="1h",
        retry_max_attempts=1,
        worker_wait="60s",
    ) as served:
        for _ in range(3):
            assert (await served.refusal(tokenized("[[sim: fail]]"))).code.name == "UNAVAILABLE"
        await served.at_rest()
        assert served.worker().breaker.state.value == "open"
        requests = (tokenized("x"), seeing(PICTURE, data_url("photo_640x480.jpg")))
        answers = [asyncio.create_task(served.generate(request)) for request in requests]
        await eventually(lambda: served.metric("router_requests_in_flight") == 2)
        assert served.workers[0].stats.calls["Generate"] == 3
        served.let_breaker_rest()
        for answer in answers:
            assert (await answer)[-1].complete.finish_reason == "stop"


async def test_a_broken_stream_goes_on_elsewhere_where_that_is_wished() -> None:
    breaking = SimOptions(faults=("1*fail-after-chunks=20",))
    async with serving(breaking, breaking, migration=True) as served:
        request = streamed("x", max_tokens=50, ignore_eos=True)
        told = [r async for r in served.stub.Generate(request, timeout=60)]
        assert len(chunk_ids(told)) == 50
        (complete,) = completes(told)
        assert (complete.finish_reason, complete.prompt_tokens) == ("length", 1)
        asked = [r.request for w in served.workers for r in w.stats.received]
        assert sorted(len(a.tokenized.input_ids) for a in asked) == [1, 21, 41]
        assert sorted(a.sampling_params.max_tokens for a in asked) == [10, 30, 50]
        await served.at_rest()
        # It is accounted as the one stream that the client saw.
        assert served.metric("router_output_tokens_total", model=MODEL) == 50
        assert served.metric("router_prompt_tokens_total", model=MODEL) == 1
        assert served.metric("router_relayed_messages_total") == 51
        assert served.metric("router_first_output_seconds_count", model=MODEL) == 1


async def test_an_answer_that_broke_off_after_its_last_token_is_not_gone_on_with() -> None:
    async with serving(SimOptions(), SimOptions(), migration=True) as served:
        request = streamed("x", temperature=0)
        ids = chunk_ids([r async for r in served.stub.Generate(request, timeout=60)])
        assert ids[-1] == 151645
        for worker in served.workers:
            worker.troubles.add(f"1*fail-after-chunks={len(ids)}")
        call = served.stub.Generate(request, timeout=60)
        told: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for response in call:
                told += response.chunk.token_ids
        assert told == ids
        refused = Refusal.of(error.value)
        assert (refused.reason, refused.route["attempts"]) == ("WORKER_STREAM_BROKEN", "1")


class _Forwarder(grpc.GenericRpcHandler):
    """A worker that passes calls on to another, and of a Generate `message` and no more."""

    def __init__(self, worker: grpc.aio.Channel, message: bytes) -> None:
        self._worker = worker
        self._message = message

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        call = self._worker.unary_stream(details.method)

        async def one(request: bytes, _: object) -> bytes:
            (answer,) = [answer async for answer in call(request)]
            return answer

        async def several(request: bytes, context: Any) -> AsyncIterator[bytes]:
            if details.method.endswith("/Generate"):
                yield self._message
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            async for answer in call(request):
                yield answer

        if details.method.endswith(("/Generate", "/GetTokenizer", "/SubscribeKvEvents")):
            return grpc.unary_stream_rpc_method_handler(several)
        return grpc.unary_unary_rpc_method_handler(one)


async def test_a_stream_with_bytes_that_are_no_message_is_not_gone_on_with() -> None:
    # It begins as a chunk does, and its ids can be counted.
    message = bytes.fromhex("0a080a01d11082011862")
    with pytest.raises(DecodeError):
        engine.GenerateResponse.FromString(message)
    worker = SimWorker(SimOptions())
    address = await worker.start("127.0.0.1:0")
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            server.add_generic_rpc_handlers((_Forwarder(channel, message),))
            await server.start()
            async with serving(f"127.0.0.1:{port}", migration=True) as served:
                method = "/vllm.grpc.engine.VllmEngine/Generate"
                request = streamed("x").SerializeToString()
                call, told = served.channel.unary_stream(method)(request, timeout=60), []
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    told.append(await call.read())
                    told.append(await call.read())
                assert told == [message]
                assert Refusal.of(error.value).reason == "WORKER_STREAM_BROKEN"
    finally:
        await server.stop(0)
        await worker.stop(0)
