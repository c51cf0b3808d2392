"""A client that leaves: its request ends everywhere, and is counted once, as what it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from router.request import attempt, dispatch
from router.request.record import Record
from router.request.relay import ClientGone
from router.wire import engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from tests.media.server import Request, Server, running
from tests.serving import (
    PICTURE,
    Serving,
    eventually,
    refusal_of,
    seeing,
    serving,
    streamed,
    tokenized,
)
from workers.sim import SimOptions

# What the router promises is a second; the machine that runs this may be busy.
A_SECOND = 5.0


@asynccontextmanager
async def silent_host() -> AsyncIterator[Server]:
    """A media host that takes a request and never answers it."""

    async def never(_: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with running() as host:
        host.routes["/never.png"] = never
        yield host


@pytest.mark.parametrize("point", ["prefill", "stream"])
async def test_a_request_at_a_worker_ends_there(point: str) -> None:
    directive = "hang" if point == "prefill" else "hang-after-chunks=2"
    async with serving(SimOptions()) as served:
        worker = served.workers[0]
        call = served.stub.Generate(streamed(f"[[sim: {directive}]]"), timeout=15)
        if point == "stream":
            await anext(aiter(call))
        await eventually(lambda: worker.stats.live == 1)
        assert served.worker().load.in_flight == 1
        began = time.monotonic()
        call.cancel()
        await eventually(lambda: worker.stats.cancelled == 1, timeout=A_SECOND)
        await served.at_rest()
        assert time.monotonic() - began < A_SECOND
        assert served.outcomes() == {("client_cancelled", ""): 1}
        assert served.metric("router_requests_in_flight") == 0
        assert served.metric("router_worker_in_flight", worker=worker.address) == 0
        assert served.worker().breaker.state.value == "closed"


async def test_a_waiting_request_leaves_the_queue() -> None:
    async with serving(SimOptions(), max_concurrent=1, queue_timeout="60s") as served:
        first = served.stub.Generate(streamed("[[sim: hang]]"), timeout=15)
        await eventually(lambda: served.workers[0].stats.live == 1)
        second = served.stub.Generate(streamed("x"), timeout=15)
        await eventually(lambda: served.app.admission.waiting == 1)
        second.cancel()
        await eventually(lambda: served.app.admission.waiting == 0, timeout=A_SECOND)
        assert served.workers[0].stats.calls["Generate"] == 1
        first.cancel()
        await served.at_rest()
        assert served.outcomes() == {("client_cancelled", ""): 2}


async def test_a_request_that_fetches_stops_fetching() -> None:
    async with (
        silent_host() as host,
        serving(SimOptions(mm_processor=""), media_allow_private_hosts=True) as served,
    ):
        request = seeing(PICTURE, host.url("/never.png"))
        call = served.stub.Generate(request, timeout=15)
        await host.reached(requests=1)
        call.cancel()
        await served.at_rest()
        assert served.outcomes() == {("client_cancelled", ""): 1}
        assert served.workers[0].stats.calls["Generate"] == 0
        budget = served.app._intake.budget
        await eventually(lambda: budget.used.nbytes == 0, timeout=A_SECOND)


async def test_an_abort_ends_a_request_that_still_fetches() -> None:
    async with (
        silent_host() as host,
        serving(SimOptions(mm_processor=""), media_allow_private_hosts=True) as served,
    ):
        request = seeing(PICTURE, host.url("/never.png"))
        request.request_id = "a"
        call = served.stub.Generate(request, timeout=30)
        await host.reached(requests=1)
        await served.stub.Abort(engine.AbortRequest(request_ids=["a"]), timeout=10)
        await eventually(lambda: not served.metric("router_requests_in_flight"), timeout=A_SECOND)
        call.cancel()


async def aborted(served: Serving, request_id: str = "a") -> None:
    await served.stub.Abort(engine.AbortRequest(request_ids=[request_id]), timeout=30)


def ends(responses: list[engine.GenerateResponse]) -> list[str]:
    return [response.complete.finish_reason for response in responses]


async def test_an_abort_before_the_worker_is_called_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(*_: object) -> None:
        reached.set()
        await go_on.wait()

    monkeypatch.setattr(dispatch, "connect", slowly)
    async with serving(SimOptions()) as served:
        generating = asyncio.create_task(served.generate(streamed("x", "a")))
        await reached.wait()
        aborting = asyncio.create_task(aborted(served))
        await eventually(lambda: served.workers[0].stats.calls["Abort"] == 1)
        go_on.set()
        assert ends(await generating) == ["abort"]
        await aborting
        assert served.workers[0].stats.calls["Generate"] == 0
        await served.at_rest()
        assert served.outcomes() == {("ok", ""): 1}


@pytest.mark.parametrize("chunks", [0, 2])
async def test_an_abort_that_the_worker_does_not_heed_ends_the_call(
    monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    hang = f"[[sim: hang-after-chunks={chunks}]]" if chunks else "[[sim: hang]]"
    monkeypatch.setattr(attempt, "_ABORT_TIMEOUT", 0.2)
    async with serving(SimOptions(), SimOptions(), idle_timeout="1h") as served:
        for worker in served.workers:
            worker.troubles.add("Abort: hang")
        generating = asyncio.create_task(served.generate(streamed(hang, "a")))
        running = served.app.dispatcher.running
        await eventually(lambda: [a.progress.messages for a in running.all()] == [chunks])
        await eventually(lambda: sum(worker.stats.live for worker in served.workers) == 1)
        await aborted(served)
        ended, _ = await asyncio.wait([generating], timeout=20)
        assert ended and ends(generating.result()) == [""] * chunks + ["abort"]
        await served.at_rest()
        assert sum(worker.stats.calls["Generate"] for worker in served.workers) == 1
        assert {w.breaker.state.value for w in served.app.registry} == {"closed"}


async def test_a_request_is_aborted_though_whoever_asked_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "_ABORT_TIMEOUT", 0.5)
    async with serving(SimOptions()) as served:
        worker = served.workers[0]
        worker.troubles.add("Abort: hang")
        generating = asyncio.create_task(served.generate(streamed("[[sim: hang]]", "a")))
        await eventually(lambda: worker.stats.live == 1)
        aborting = asyncio.create_task(aborted(served))
        await eventually(lambda: worker.stats.calls["Abort"] == 1)
        aborting.cancel()
        ended, _ = await asyncio.wait([generating], timeout=30)
        assert ended and ends(generating.result()) == ["abort"]
        await served.at_rest()


async def test_an_abort_is_answered_when_the_worker_was_told_and_not_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def heard(*_: object) -> engine.AbortResponse:
        return engine.AbortResponse()

    monkeypatch.setattr("workers.sim.servicer.SimServicer.Abort", heard)
    monkeypatch.setattr(attempt, "_ABORT_TIMEOUT", 3600.0)
    async with serving(SimOptions()) as served:
        call = served.stub.Generate(streamed("[[sim: hang]]", "a"), timeout=60)
        await eventually(lambda: served.workers[0].stats.live == 1)
        await aborted(served)
        assert served.workers[0].stats.live == 1
        call.cancel()
        await served.at_rest()


async def test_an_aborted_request_whose_worker_fails_is_not_tried_elsewhere() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        for worker in served.workers:
            worker.troubles.add("Abort: hang")
        generating = asyncio.create_task(served.generate(streamed("[[sim: hang]]", "a")))
        await eventually(lambda: sum(worker.stats.live for worker in served.workers) == 1)
        (busy,) = (worker for worker in served.workers if worker.stats.live)
        aborting = asyncio.create_task(aborted(served))
        await eventually(lambda: busy.stats.calls["Abort"] == 1)
        await busy.stop(0)
        assert ends(await generating) == ["abort"]
        await aborting
        assert sum(worker.stats.calls["Generate"] for worker in served.workers) == 1
        assert served.outcomes() == {("ok", ""): 1}


async def test_an_abort_ends_every_request_under_its_id_wherever_it_is() -> None:
    async with serving(SimOptions(), max_concurrent=1) as served:
        worker = served.workers[0]
        first = asyncio.create_task(served.generate(streamed("[[sim: hang]]", "a")))
        await eventually(lambda: worker.stats.live == 1)
        second = asyncio.create_task(served.generate(streamed("x", "a")))
        await eventually(lambda: served.app.admission.waiting == 1)
        await aborted(served)
        assert ends(await first) == ends(await second) == ["abort"]
        assert worker.stats.calls["Generate"] == 1
        await served.at_rest()


async def test_an_embedding_that_is_aborted_before_a_worker_has_it_says_so() -> None:
    async with serving(SimOptions(), max_concurrent=1) as served:
        first = served.stub.Generate(streamed("[[sim: hang]]"), timeout=60)
        await eventually(lambda: served.workers[0].stats.live == 1)
        request = engine.EmbedRequest(
            request_id="a", tokenized=engine.TokenizedInput(input_ids=[1])
        )
        embedding = asyncio.create_task(refusal_of(served.stub.Embed(request, timeout=60)))
        await eventually(lambda: served.app.admission.waiting == 1)
        await aborted(served)
        refused = await embedding
        assert refused.code is grpc.StatusCode.CANCELLED
        assert "aborted" in refused.message
        first.cancel()
        await served.at_rest()
        assert served.outcomes() == {("client_cancelled", ""): 2}


async def test_an_embedding_that_nobody_waits_for_is_given_up() -> None:
    async with serving(SimOptions()) as served:
        served.workers[0].troubles.add("Embed: hang")
        request = engine.EmbedRequest(tokenized=engine.TokenizedInput(input_ids=[1]))
        call = served.stub.Embed(request, timeout=15)
        await eventually(lambda: served.worker().load.in_flight == 1)
        await eventually(lambda: served.workers[0].stats.calls["Embed"] == 1)
        call.cancel()
        await served.at_rest()
        assert served.outcomes() == {("client_cancelled", ""): 1}


async def test_word_of_an_abort_waits_for_a_reader_only_while_the_request_may_live() -> None:
    async def unread(_: bytes) -> None:
        await asyncio.Event().wait()

    async with serving(SimOptions(), max_concurrent=1, queue_timeout="60s") as served:
        first = served.stub.Generate(streamed("[[sim: hang]]"), timeout=60)
        await eventually(lambda: served.app.admission.active == 1)
        pipeline, record = served.app.pipeline, Record("a")
        waiting = asyncio.create_task(
            pipeline.generate(streamed("x"), model="", time_left=3, write=unread, record=record)
        )
        await eventually(lambda: served.app.admission.waiting == 1)
        await pipeline.abort("a")
        ended, _ = await asyncio.wait([waiting], timeout=30)
        waiting.cancel()
        assert ended and isinstance(waiting.exception(), ClientGone)
        first.cancel()
        await served.at_rest()


async def test_a_clients_deadline_ends_the_workers_call_too() -> None:
    async with serving(SimOptions()) as served:
        # Long enough for the call to reach its worker, however slow the machine.
        refused = await served.refusal(tokenized("[[sim: hang]]"), timeout=2)
        assert refused.code.name == "DEADLINE_EXCEEDED"
        await eventually(lambda: served.workers[0].stats.live == 0, timeout=A_SECOND)
        await served.at_rest()
        ((outcome, _),) = served.outcomes()
        assert outcome in ("client_cancelled", "worker_failed")
        assert served.worker().breaker._failures == 0


async def test_a_deadline_in_mid_stream_is_not_the_workers_failure() -> None:
    async with serving(SimOptions(), breaker_min_calls=1) as served:
        for _ in range(3):
            refused = await served.refusal(streamed("[[sim: hang-after-chunks=2]]"), timeout=1)
            assert refused.code.name == "DEADLINE_EXCEEDED"
            await served.at_rest()
        assert served.worker().breaker.state.value == "closed"


async def test_clients_that_leave_at_any_moment_are_all_counted_as_such() -> None:
    async with serving(SimOptions(), SimOptions(), max_concurrent=4, queue_size=100) as served:

        async def leave(moment: int) -> None:
            # No answer ends by itself, so that everybody leaves in its midst.
            call = served.stub.Generate(streamed("[[sim: hang-after-chunks=6]]"), timeout=60)
            if moment % 2:
                for _ in range(1 + moment // 2 % 6):
                    await call.read()
            else:
                # Before it is sent, on its way, or waiting for a place.
                for _ in range(moment):
                    await asyncio.sleep(0)
            call.cancel()

        await asyncio.gather(*(leave(moment) for moment in range(60)))
        await served.at_rest()
        counted = served.outcomes()
        assert set(counted) == {("client_cancelled", "")}
        # A call that is cancelled before it was sent never arrives; one that was read from has.
        assert 30 <= counted[("client_cancelled", "")] <= 60
        assert {w.breaker.state.value for w in served.app.registry} == {"closed"}
        assert served.app.admission.waiting == 0


@asynccontextmanager
async def clogged(served: Serving) -> AsyncIterator[Any]:
    """A call whose client has stopped reading, so that the router waits in a write."""
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
    async with grpc.aio.insecure_channel(served.app.listen, options=narrow) as channel:
        request = streamed("x", n=128, logprobs=20, ignore_eos=True, max_tokens=2000)
        call = VllmEngineStub(channel).Generate(request)
        await anext(aiter(call))
        (attempt,) = served.app.dispatcher.running.all()
        relayed = -1
        while relayed != attempt.progress.messages or not attempt.progress.writing:
            assert served.app.dispatcher.running.all() == [attempt]
            relayed = attempt.progress.messages
            # Longer than any write takes that does not wait for the client.
            await asyncio.sleep(0.1)
        yield call


async def test_a_client_that_leaves_while_a_write_waits_for_it_has_cancelled() -> None:
    async with serving(SimOptions(tokens_per_chunk=500)) as served, clogged(served) as call:
        call.cancel()
        await served.at_rest()
        assert served.outcomes() == {("client_cancelled", ""): 1}


async def test_a_client_that_reads_slowly_is_no_silent_worker() -> None:
    options = SimOptions(tokens_per_chunk=500)
    async with serving(options, idle_timeout="1s") as served, clogged(served):
        (attempt,) = served.app.dispatcher.running.all()
        await eventually(lambda: time.monotonic() - attempt.progress.last_at > 2.5)
        assert served.worker().load.in_flight == 1


async def test_a_client_that_reads_nothing_is_held_no_longer_than_a_request_may_live() -> None:
    options = SimOptions(tokens_per_chunk=500)
    settings: dict[str, Any] = {"request_timeout": "5s", "breaker_min_calls": 1}
    async with serving(options, **settings) as served:
        async with clogged(served):
            await eventually(lambda: not served.worker().load.in_flight)
        await served.at_rest()
        # Its own doing, and not its worker's.
        assert served.outcomes() == {("client_cancelled", "deadline"): 1}
        assert served.worker().breaker.state.value == "closed"
