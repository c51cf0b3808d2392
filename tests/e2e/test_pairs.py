"""Two workers for one request: the same answers, the right pictures, nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
from PIL import Image

from router.fleet.pressure import OVERHEAD_TOKENS
from router.request import dispatch, pipeline, relay
from router.request.pipeline import Pipeline
from router.request.prepared import Body
from router.wire import admin, engine
from tests.e2e.pairs import FLOWS, MOONCAKE, NIXL, Flow, Paired, decoding, pairing, prefilling
from tests.media.server import fixed, running
from tests.serving import (
    PICTURE,
    Refusal,
    completes,
    data_url,
    eventually,
    hold_answers,
    image,
    seeing,
    serving,
    streamed,
    tokenized,
)
from workers.sim import SimOptions, SimWorker
from workers.sim.faults import Troubles
from workers.sim.refused import Refused
from workers.sim.stats import Stats
from workers.sim.tokenizer import encode

ASK = PICTURE + "Describe it"
PHOTO = "photo_640x480.jpg"
MODES = ("router", "worker")
# What the router promises is a second; the machine that runs this may be busy.
A_SECOND = 5.0

by_flow = pytest.mark.parametrize("flow", FLOWS)
by_mode = pytest.mark.parametrize("mode", MODES)


def solid(red: int, green: int, blue: int) -> str:
    """A picture of 96x64 pixels as a data: URL."""
    file = io.BytesIO()
    Image.fromarray(np.full((64, 96, 3), (red, green, blue), np.uint8)).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def sent(worker: SimWorker) -> engine.GenerateRequest:
    """The last request that a worker has got."""
    return worker.stats.received[-1].request


def params(request: engine.GenerateRequest) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(request.kv_transfer_params_json)
    return parsed


def answers(responses: list[engine.GenerateResponse]) -> dict[int, Any]:
    """Each choice's ids, logprobs and end, however many chunks they came in.

    Without how much was cached, which a handoff rightly changes.
    """
    told: dict[int, Any] = {}
    for end in completes(responses):
        end.cached_tokens = 0
        chunks = [r.chunk for r in responses if r.HasField("chunk") and r.chunk.index == end.index]
        told[end.index] = (
            [token for chunk in chunks for token in chunk.token_ids],
            [p for chunk in chunks for p in chunk.output_logprobs.token_logprobs],
            end.SerializeToString(deterministic=True),
        )
    return told


# -- The same as one worker


@by_flow
@by_mode
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"n": 3, "seed": 1, "temperature": 0.7},
        {"logprobs": 3, "max_tokens": 20, "stop": ["pixels"]},
        # The very first token ends the answer, and the prefill leg must not stumble over it.
        {"stop_token_ids": [ord("I")]},
        {"json_object": True},
    ],
    ids=lambda sampling: "+".join(sampling) or "plain",
)
async def test_a_pair_answers_as_one_worker_does(
    tmp_path: Path, flow: Flow, mode: str, sampling: dict[str, Any]
) -> None:
    sides = {"prefill": [prefilling(flow)], "decode": [decoding(flow)]}
    async with (
        serving(SimOptions(), mm_processing=mode) as single,
        pairing(tmp_path, mm_processing=mode, **sides) as paired,
    ):
        for stream in (False, True):
            request = seeing(ASK, data_url(PHOTO), **sampling)
            request.stream = stream
            expected = answers(await single.generate(request))
            assert len(expected) == sampling.get("n", 1)
            assert answers(await paired.served.generate(request)) == expected
        assert (await paired.served.route(request))["worker"] == paired.address()
        await paired.at_rest()
        assert paired.served.outcomes() == {("ok", ""): 3}


@by_flow
async def test_text_and_clients_tensors_take_pairs_too(tmp_path: Path, flow: Flow) -> None:
    async with (
        serving(SimOptions(), mm_processing="router") as single,
        pairing(tmp_path, prefill=[prefilling(flow)], decode=[decoding(flow)]) as paired,
    ):
        await single.say(seeing(ASK, data_url(PHOTO)))
        tensors = await _as_tensors(single.workers[0], data_url(PHOTO))
        for request in (tokenized("Hello there"), engine.GenerateRequest(text="Hello"), tensors):
            assert await paired.served.say(request) == await single.say(request)
        assert paired.prefill[0].stats.received[-1].wire_bytes > 500_000
        assert paired.decode[0].stats.received[-1].wire_bytes < 10_000
        await paired.at_rest()


async def _as_tensors(worker: SimWorker, url: str) -> engine.GenerateRequest:
    """The request that a router makes of a picture, whole, as a client may send it."""
    caught: list[engine.GenerateRequest] = []
    note = worker.stats.note

    def keep(request: engine.GenerateRequest, metadata: Any) -> None:
        whole = engine.GenerateRequest()
        whole.CopyFrom(request)
        caught.append(whole)
        note(request, metadata)

    worker.stats.note = keep  # type: ignore[method-assign]
    async with serving(worker.address, mm_processing="router") as served:
        await served.generate(seeing(ASK, url))
    worker.stats.note = note  # type: ignore[method-assign]
    return caught[-1]


# -- What each leg gets


@by_flow
async def test_in_router_mode_media_are_fetched_once_and_decode_gets_their_grids(
    tmp_path: Path, flow: Flow
) -> None:
    async with (
        running() as host,
        pairing(
            tmp_path, prefill=[prefilling(flow)], decode=[decoding(flow)], mm_processing="router"
        ) as paired,
    ):
        host.routes["/a.jpg"] = fixed(image(PHOTO))
        await paired.served.generate(seeing(ASK, host.url("/a.jpg")))
        assert len(host.requests) == 1
        first, second = sent(paired.prefill[0]), sent(paired.decode[0])
        assert first.mm_inputs.HasField("pixel_values")
        assert not second.mm_inputs.HasField("pixel_values")
        assert second.mm_inputs.mm_hashes == first.mm_inputs.mm_hashes
        assert second.mm_inputs.mm_placeholders == first.mm_inputs.mm_placeholders
        for name in ("image_grid_thw", "patches_per_image"):
            ours, theirs = (leg.mm_inputs.model_specific_tensors[name] for leg in (first, second))
            assert ours == theirs
        assert first.tokenized == second.tokenized
        # Only the prefill leg ran the encoder.
        assert paired.decode[0].encoder.misses == 0


@by_flow
async def test_in_worker_mode_the_prefill_legs_identity_makes_the_decode_request(
    tmp_path: Path, flow: Flow
) -> None:
    async with (
        running() as host,
        pairing(
            tmp_path, prefill=[prefilling(flow)], decode=[decoding(flow)], mm_processing="worker"
        ) as paired,
    ):
        url = host.url("/a.jpg")
        host.routes["/a.jpg"] = fixed(image(PHOTO))
        await paired.served.generate(seeing(ASK, url))
        first, second = sent(paired.prefill[0]), sent(paired.decode[0])
        assert [item.url for item in first.media_refs.items] == [url]
        assert not second.HasField("media_refs")
        assert len(second.mm_inputs.mm_hashes) == 1
        assert len(second.tokenized.input_ids) > len(first.tokenized.input_ids)
        assert len(host.requests) == 1


@by_flow
async def test_without_an_identity_the_decode_leg_fetches_again(tmp_path: Path, flow: Flow) -> None:
    async with (
        serving(SimOptions()) as single,
        pairing(
            tmp_path,
            prefill=[prefilling(flow, media_identity=False)],
            decode=[decoding(flow, gullible=True)],
        ) as paired,
    ):
        request = seeing(ASK, data_url(PHOTO))
        assert await paired.served.say(request) == await single.say(request)
        assert sent(paired.decode[0]).HasField("media_refs")
        assert paired.served.metric("router_media_identity_missing_total") == 1
        await paired.at_rest()


@by_flow
async def test_without_an_identity_the_request_fails_where_that_is_asked_for(
    tmp_path: Path, flow: Flow
) -> None:
    async with pairing(
        tmp_path,
        prefill=[prefilling(flow, media_identity=False)],
        decode=[decoding(flow)],
        disagg_refetch=False,
    ) as paired:
        refused = await paired.served.refusal(seeing(ASK, data_url(PHOTO)))
        assert refused.reason == "LEG_FAILED"
        assert refused.about == {"leg": "prefill", "cause": "no_media_identity"}
        assert paired.decode[0].stats.calls["Generate"] == 0
        await paired.at_rest()
        # It concerns pictures alone.
        await paired.served.say(tokenized("Hello"))


@by_flow
@by_mode
async def test_pictures_of_one_size_never_get_each_others_answer(
    tmp_path: Path, flow: Flow, mode: str
) -> None:
    # A gullible worker says nothing when it decodes another's picture.
    sides = {"prefill": [prefilling(flow)] * 2, "decode": [decoding(flow, gullible=True)] * 2}
    urls = [solid(255, 0, 0), solid(0, 0, 255), solid(0, 255, 0), solid(9, 9, 9)]
    async with (
        serving(SimOptions()) as single,
        pairing(tmp_path, mm_processing=mode, **sides) as paired,
    ):
        expected = [await single.say(seeing(ASK, url)) for url in urls]
        assert len(set(expected)) == len(urls)
        one_by_one = [await paired.served.say(seeing(ASK, url)) for url in urls * 2]
        assert one_by_one == expected * 2
        at_once = await asyncio.gather(*(paired.served.say(seeing(ASK, url)) for url in urls * 5))
        assert at_once == expected * 5
        await paired.at_rest()


# -- Failures


async def failing(
    folder: Path, flow: Flow, leg: str, rule: str, request: engine.GenerateRequest
) -> tuple[Refusal, Paired]:
    """The error of a request whose one pair has trouble in one leg."""
    sides = {"prefill": [prefilling(flow)], "decode": [decoding(flow)]}
    async with pairing(folder, retry_max_attempts=1, **sides) as paired:
        (paired.prefill if leg == "prefill" else paired.decode)[0].troubles.add(rule)
        refused = await paired.served.refusal(request)
        await paired.at_rest()
        return refused, paired


@by_flow
@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("rule", "code", "cause", "again"),
    [
        ("fail=UNAVAILABLE", "UNAVAILABLE", "WORKER_UNAVAILABLE", True),
        ("fail=INTERNAL", "INTERNAL", "WORKER_INTERNAL", False),
        ("saturate", "UNAVAILABLE", "WORKER_SATURATED", True),
        ("end-without-complete", "UNAVAILABLE", "WORKER_STREAM_BROKEN", False),
    ],
)
async def test_the_leg_that_fails_is_named(
    tmp_path: Path, flow: Flow, leg: str, rule: str, code: str, cause: str, again: bool
) -> None:
    refused, paired = await failing(tmp_path, flow, leg, rule, tokenized("Hello"))
    assert (refused.code.name, refused.reason) == (code, "LEG_FAILED")
    assert refused.about == {"leg": leg, "cause": cause}
    assert refused.message.startswith(f"the {leg} leg failed: ")
    assert refused.retry_after == (timedelta(seconds=1) if again else None)
    assert refused.route["worker"] == paired.address()
    # Blocks that nobody will fetch are let go.
    assert (paired.prefill[0].stats.calls["Abort"] > 0) == (leg == "decode")
    ((_, reason),) = paired.served.outcomes()
    assert reason == "leg_failed"


@by_flow
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_what_a_worker_says_of_the_request_passes_through(
    tmp_path: Path, flow: Flow, leg: str
) -> None:
    request = tokenized("Hello")
    refused, _ = await failing(tmp_path, flow, leg, "fail=INVALID_ARGUMENT", request)
    assert refused.code.name == "INVALID_ARGUMENT"
    assert refused.message == "This call fails as was asked for."
    assert refused.reason == ""


@by_flow
async def test_only_the_failing_legs_worker_is_blamed(tmp_path: Path, flow: Flow) -> None:
    sides = {"prefill": [prefilling(flow)], "decode": [decoding(flow)]}
    async with pairing(tmp_path, retry_max_attempts=1, breaker_min_calls=2, **sides) as paired:
        paired.decode[0].troubles.add("2*fail=UNAVAILABLE")
        for _ in range(2):
            await paired.served.refusal(tokenized("Hello"))
        await paired.at_rest()
        states = {w.address: w.breaker.state.value for w in paired.served.app.registry}
        assert states == {
            paired.prefill[0].address: "closed",
            paired.decode[0].address: "open",
        }
        refused = await paired.served.refusal(tokenized("Hello"))
        assert refused.reason == "NO_AVAILABLE_WORKER"
        assert refused.about == {"leg": "decode", "registered": "1", "breaker_open": "1"}


@by_flow
@by_mode
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_retry_takes_a_fresh_pair_and_fresh_ids(
    tmp_path: Path, flow: Flow, mode: str, leg: str
) -> None:
    sides = {"prefill": [prefilling(flow)] * 2, "decode": [decoding(flow)] * 2}
    async with pairing(tmp_path, mm_processing=mode, **sides) as paired:
        side = paired.prefill if leg == "prefill" else paired.decode
        # Whoever is asked first fails, whoever comes next does not.
        troubles = Troubles(("1*fail=UNAVAILABLE",))
        for worker in side:
            worker.servicer._troubles = troubles
        route = await paired.served.route(seeing(ASK, data_url(PHOTO)))
        assert route["attempts"] == "2"
        (failed,) = (worker for worker in side if worker.stats.refused)
        assert failed.address not in route["worker"]
        received = [r.request for w in (*paired.prefill, *paired.decode) for r in w.stats.received]
        ids = [request.request_id for request in received]
        assert len(set(ids)) == len(ids)
        # Nobody is asked twice while there is another pair.
        assert max(w.stats.calls["Generate"] for w in (*paired.prefill, *paired.decode)) == 1
        forms = {request.HasField("media_refs") for request in received}
        assert forms == ({False} if mode == "router" else {True, False})
        if flow == MOONCAKE:
            assert len({params(request)["transfer_id"] for request in received}) == 2
        await paired.at_rest()


async def test_a_worker_that_was_tried_is_taken_again_where_no_other_pair_fits(
    tmp_path: Path,
) -> None:
    # The second prefill worker fits neither decode worker.
    prefill = [prefilling(), prefilling(kv_cache_dtype="fp8")]
    async with pairing(tmp_path, prefill=prefill, decode=[decoding()] * 2) as paired:
        paired.prefill[0].troubles.add("1*fail=UNAVAILABLE")
        route = await paired.served.route(tokenized("Hello"))
        assert route["attempts"] == "2"
        assert paired.prefill[0].stats.calls["Generate"] == 2
        assert paired.prefill[1].stats.calls["Generate"] == 0


@by_flow
async def test_nothing_is_tried_again_after_output(tmp_path: Path, flow: Flow) -> None:
    sides = {"prefill": [prefilling(flow)] * 2, "decode": [decoding(flow)] * 2}
    async with pairing(tmp_path, **sides) as paired:
        for worker in paired.decode:
            worker.troubles.add("fail-after-chunks=2")
        refused = await paired.served.refusal(streamed("Hello"))
        assert (refused.code.name, refused.reason) == ("UNAVAILABLE", "LEG_FAILED")
        assert refused.about == {"leg": "decode", "cause": "WORKER_STREAM_BROKEN"}
        assert sum(w.stats.calls["Generate"] for w in paired.decode) == 1
        await paired.at_rest()


def _cancelled(stats: Stats) -> bool:
    return stats.live == 0 and stats.cancelled == 1


def _fail_once_active(failing: SimWorker, other: SimWorker) -> None:
    """Has a worker look at a request only when the other has one too."""
    generate = failing.engine.generate

    async def later(*args: Any) -> None:
        await eventually(lambda: other.engine.active)
        await generate(*args)

    failing.engine.generate = later  # type: ignore[method-assign]


async def test_a_leg_that_refuses_ends_the_other_at_once(tmp_path: Path) -> None:
    sides = {"prefill": [prefilling(MOONCAKE)], "decode": [decoding(MOONCAKE)]}
    for leg, other in (("prefill", "decode"), ("decode", "prefill")):
        folder = tmp_path / leg
        folder.mkdir()
        async with pairing(folder, retry_max_attempts=1, **sides) as paired:
            legs = {"prefill": paired.prefill[0], "decode": paired.decode[0]}
            legs[leg].troubles.add("fail=UNAVAILABLE")
            _fail_once_active(legs[leg], legs[other])
            if other == "prefill":
                # The decode leg waits for its transfer by itself.
                legs[other].troubles.add("hang")
            refused = await paired.served.refusal(tokenized("Hello"))
            assert refused.about["leg"] == leg
            await eventually(partial(_cancelled, legs[other].stats), timeout=A_SECOND)
            await paired.at_rest()


async def test_a_prefill_that_hands_nothing_over_is_tried_elsewhere(tmp_path: Path) -> None:
    async with pairing(tmp_path, prefill=[prefilling()], decode=[decoding()]) as paired:
        await paired.served.say(tokenized("Hello"))
        # It forgets its connector, and the router has not noticed.
        paired.prefill[0].change(kv_connector="")
        refused = await paired.served.refusal(tokenized("Hello"))
        assert refused.reason == "LEG_FAILED"
        assert refused.about == {"leg": "prefill", "cause": "no_handoff"}
        assert refused.route["attempts"] == "3"
        assert paired.decode[0].stats.calls["Generate"] == 1
        await paired.at_rest()


@by_flow
async def test_a_prefill_that_its_worker_aborts_is_tried_elsewhere(
    tmp_path: Path, flow: Flow
) -> None:
    sides = {"prefill": [prefilling(flow)] * 2, "decode": [decoding(flow)] * 2}
    async with pairing(tmp_path, **sides) as paired:
        for worker in paired.prefill:
            worker.troubles.add("1*hang")
        running_call = asyncio.create_task(paired.served.route(tokenized("Hello")))
        for _ in paired.prefill:
            await eventually(lambda: any(w.engine.active for w in paired.prefill))
            (busy,) = (w for w in paired.prefill if w.engine.active)
            busy.engine.abort(sent(busy).request_id)
            await busy.engine.idle(10)
        assert (await running_call)["attempts"] == "3"
        await paired.at_rest()


# -- Mooncake's legs run at once


async def test_the_decode_legs_end_is_the_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = {"prefill": [prefilling(MOONCAKE)], "decode": [decoding(MOONCAKE)]}
    async with pairing(tmp_path, **sides) as paired:
        post = paired.prefill[0].bootstrap.post

        async def post_and_hang(*args: Any) -> None:
            await post(*args)
            await asyncio.Event().wait()

        monkeypatch.setattr(paired.prefill[0].bootstrap, "post", post_and_hang)
        await paired.served.say(tokenized("Hello"))
        await paired.at_rest()
        assert paired.prefill[0].stats.cancelled == 1
        assert paired.prefill[0].stats.calls["Abort"] == 0
        assert paired.served.outcomes() == {("ok", ""): 1}


async def test_a_prefill_leg_that_fails_late_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = {"prefill": [prefilling(MOONCAKE)], "decode": [decoding(MOONCAKE)]}
    async with pairing(tmp_path, **sides) as paired:
        post = paired.prefill[0].bootstrap.post
        speaking, go_on = asyncio.Event(), hold_answers(paired.decode[0])
        outcome = {"worker": paired.prefill[0].address, "result": "worker_unavailable"}

        async def post_and_fail(*args: Any) -> None:
            await post(*args)
            await speaking.wait()
            raise Refused(grpc.StatusCode.UNAVAILABLE, "too late")

        monkeypatch.setattr(paired.prefill[0].bootstrap, "post", post_and_fail)
        call = paired.served.stub.Generate(streamed("Hello"), timeout=60)
        stream = aiter(call)
        await anext(stream)
        speaking.set()
        await eventually(lambda: paired.served.metric("router_attempts_total", **outcome) == 1)
        go_on.set()
        assert completes([r async for r in stream])[0].finish_reason == "stop"
        await paired.at_rest()
        assert paired.served.outcomes() == {("ok", ""): 1}


async def test_a_decode_leg_does_not_wait_for_ever_for_a_silent_prefill(tmp_path: Path) -> None:
    sides = {
        "prefill": [prefilling(MOONCAKE)],
        "decode": [decoding(MOONCAKE, transfer_timeout=0.05)],
    }
    async with pairing(tmp_path, retry_max_attempts=1, **sides) as paired:
        paired.prefill[0].troubles.add("hang")
        refused = await paired.served.refusal(tokenized("Hello"))
        assert refused.about == {"leg": "decode", "cause": "WORKER_INTERNAL"}
        await paired.at_rest()


# -- Clients that leave, and clients that abort


@by_flow
@pytest.mark.parametrize("point", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_ends_both_legs(tmp_path: Path, flow: Flow, point: str) -> None:
    sides = {"prefill": [prefilling(flow)], "decode": [decoding(flow)]}
    async with pairing(tmp_path, **sides) as paired:
        first, second = paired.prefill[0], paired.decode[0]
        rule = {"prefill": "hang", "decode": "hang", "stream": "hang-after-chunks=2"}[point]
        (first if point == "prefill" else second).troubles.add(rule)
        call = paired.served.stub.Generate(streamed("Hello"), timeout=15)
        if point == "stream":
            await anext(aiter(call))
        elif point == "decode":
            await eventually(lambda: first.stats.finished == 1 and second.engine.active)
        else:
            await eventually(lambda: first.engine.active)
        call.cancel()
        await paired.at_rest()
        assert paired.served.outcomes() == {("client_cancelled", ""): 1}
        # Told wherever blocks may be held for a decode leg that will not come.
        assert first.stats.calls["Abort"] == (0 if point == "stream" else 1)
        if point == "prefill" and flow == NIXL:
            assert second.stats.calls["Generate"] == 0
        assert {w.breaker.state.value for w in paired.served.app.registry} == {"closed"}


async def test_a_client_that_leaves_between_the_legs_releases_the_prefill_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pairing(tmp_path, prefill=[prefilling()], decode=[decoding()]) as paired:
        between = asyncio.Event()
        connect = relay.connect
        decode_channel = paired.served.app.registry.get(paired.decode[0].address).channel  # type: ignore[union-attr]

        async def connecting(channel: grpc.aio.Channel, limit: float) -> None:
            if channel is decode_channel:
                between.set()
                await asyncio.Event().wait()
            await connect(channel, limit)

        monkeypatch.setattr(dispatch, "connect", connecting)
        call = paired.served.stub.Generate(streamed("Hello"), timeout=15)
        async with asyncio.timeout(10):
            await between.wait()
        prefill = paired.prefill[0]
        assert prefill.stats.finished == 1
        assert prefill.stats.calls["Abort"] == 0
        call.cancel()
        await paired.at_rest()
        assert prefill.stats.calls["Abort"] == 1
        assert paired.decode[0].stats.calls["Generate"] == 0
        assert paired.served.outcomes() == {("client_cancelled", ""): 1}


@by_flow
async def test_clients_that_leave_at_any_moment_leave_nothing(tmp_path: Path, flow: Flow) -> None:
    speeds: dict[str, Any] = {"time_per_output_token": 0.0005, "prefill_rate": 20_000}
    sides = {
        "prefill": [prefilling(flow, **speeds)] * 2,
        "decode": [decoding(flow, **speeds)] * 2,
    }
    async with pairing(tmp_path, **sides) as paired:

        async def leave(moment: int) -> None:
            # No answer ends by itself, so that everybody leaves in its midst.
            prompt = "[[sim: hang-after-chunks=8]]" + "Hello " * 20
            call = paired.served.stub.Generate(streamed(prompt, n=2), timeout=60)
            match moment % 3:
                case 0:  # before it is sent, or on its way
                    for _ in range(moment):
                        await asyncio.sleep(0)
                case 1:  # about when its prefill runs, or is handed over
                    calls = sum(w.stats.calls["Generate"] for w in paired.prefill)
                    side = paired.prefill if moment % 2 else paired.decode
                    await eventually(
                        lambda: (
                            any(w.engine.active for w in side)
                            or sum(w.stats.calls["Generate"] for w in paired.prefill) > calls
                        )
                    )
                case 2:
                    for _ in range(1 + moment // 3 % 8):
                        await call.read()
            call.cancel()

        await asyncio.gather(*(leave(moment) for moment in range(60)))
        await paired.at_rest()
        counted = paired.served.outcomes()
        assert set(counted) == {("client_cancelled", "")}
        # A call that is cancelled before it was sent never arrives; one that was read from has.
        assert 20 <= counted[("client_cancelled", "")] <= 60
        for worker in (*paired.prefill, *paired.decode):
            assert worker.engine.active == 0
            assert worker.scheduler.running == 0
        await paired.served.say(tokenized("Hello"))


@by_flow
@pytest.mark.parametrize("point", ["prefill", "stream"])
async def test_an_abort_ends_the_request_and_is_no_failure(
    tmp_path: Path, flow: Flow, point: str
) -> None:
    sides = {"prefill": [prefilling(flow)] * 2, "decode": [decoding(flow)] * 2}
    async with pairing(tmp_path, **sides) as paired:
        side = paired.prefill if point == "prefill" else paired.decode
        for worker in side:
            worker.troubles.add("hang" if point == "prefill" else "hang-after-chunks=2")
        request = streamed("Hello", "mine", n=2)
        call = asyncio.create_task(paired.served.generate(request))
        await eventually(lambda: any(w.engine.active for w in side))
        if point == "stream":
            await eventually(lambda: sum(w.stats.tokens for w in side) > 1)
        await paired.served.stub.Abort(engine.AbortRequest(request_ids=["mine"]), timeout=5)
        ends = completes(await call)
        assert sorted(end.index for end in ends) == [0, 1]
        assert {end.finish_reason for end in ends} == {"abort"}
        await paired.at_rest()
        assert paired.served.outcomes() == {("ok", ""): 1}
        assert sum(w.stats.calls["Generate"] for w in side) == 1


@by_flow
async def test_tensors_are_let_go_at_the_first_output(
    tmp_path: Path, flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[weakref.ref[Body]] = []
    prepare = Pipeline.prepare

    async def preparing(*args: Any) -> Any:
        prepared = await prepare(*args)
        bodies.append(weakref.ref(prepared.body))
        return prepared

    monkeypatch.setattr(Pipeline, "prepare", preparing)
    sides = {"prefill": [prefilling(flow)], "decode": [decoding(flow)]}
    async with pairing(tmp_path, mm_processing="router", **sides) as paired:
        paired.decode[0].troubles.add("hang-after-chunks=2")
        request = seeing(ASK, data_url(PHOTO))
        request.stream = True
        call = paired.served.stub.Generate(request, timeout=15)
        await anext(aiter(call))
        (body,) = bodies
        await eventually(lambda: gc.collect() >= 0 and body() is None, "the body is let go")
        assert paired.served.app._intake.budget.used.nbytes == 0
        call.cancel()
        await paired.at_rest()


# -- Who is chosen


async def test_roles_come_from_flags() -> None:
    prefill, decode_ = SimWorker(prefilling()), SimWorker(decoding())
    try:
        first, second = [await w.start("127.0.0.1:0") for w in (prefill, decode_)]
        async with serving(prefill=first, decode=second) as served:
            await eventually(lambda: len(served.app.registry) == 2)
            await served.ready()
            assert (await served.route(tokenized("x")))["worker"] == f"{first}+{second}"
    finally:
        await prefill.stop(0)
        await decode_.stop(0)


async def test_roles_come_from_the_connector() -> None:
    async with serving(
        prefilling(kv_role="kv_producer"), decoding(kv_role="kv_consumer")
    ) as served:
        both = "+".join(worker.address for worker in served.workers)
        assert (await served.route(tokenized("x")))["worker"] == both
        listed = await served.admin.ListWorkers(admin.ListWorkersRequest(), timeout=10)
        assert [worker.role for worker in listed.workers] == [admin.PREFILL, admin.DECODE]


async def test_a_pair_must_fit(tmp_path: Path) -> None:
    odd = decoding(kv_cache_dtype="fp8")
    async with pairing(tmp_path, prefill=[prefilling()], decode=[odd, decoding(), odd]) as paired:
        for _ in range(6):
            await paired.served.say(tokenized("x"))
        assert [w.stats.calls["Generate"] for w in paired.decode] == [0, 6, 0]


async def test_what_keeps_workers_apart_is_named_before_anything_is_fetched(
    tmp_path: Path,
) -> None:
    async with (
        running() as host,
        pairing(
            tmp_path,
            prefill=[prefilling(block_size=16)],
            decode=[decoding(block_size=32)],
            mm_processing="router",
        ) as paired,
    ):
        host.routes["/a.jpg"] = fixed(image(PHOTO))
        for request in (tokenized("x"), seeing(ASK, host.url("/a.jpg"))):
            refused = await paired.served.refusal(request)
            assert (refused.code.name, refused.reason) == ("UNAVAILABLE", "NO_COMPATIBLE_PAIR")
            assert refused.about == {"cause": "block_size", "prefill": "1", "decode": "1"}
        assert not host.requests
        assert not any(w.stats.calls["Generate"] for w in paired.served.workers)


@by_flow
async def test_each_leg_has_to_fetch_the_schemes_of_a_request(tmp_path: Path, flow: Flow) -> None:
    async with pairing(
        tmp_path,
        prefill=[prefilling(flow, local_root=tmp_path)],
        decode=[decoding(flow)],
        media_local_root=str(tmp_path),
    ) as paired:
        (tmp_path / "a.jpg").write_bytes(image(PHOTO))
        refused = await paired.served.refusal(seeing(ASK, f"file://{tmp_path}/a.jpg"))
        assert refused.reason == "MEDIA_REF_SCHEME_NOT_ACCEPTED"
        assert refused.about["leg"] == "decode"
        assert not any(w.stats.calls["Generate"] for w in paired.served.workers)
        # Others are served.
        await paired.served.say(seeing(ASK, data_url(PHOTO)))


async def test_one_side_alone_serves_nothing(tmp_path: Path) -> None:
    async with pairing(tmp_path, prefill=[prefilling()], decode=[]) as paired:
        refused = await paired.served.refusal(tokenized("x"))
        assert refused.reason == "NO_AVAILABLE_WORKER"
        assert refused.about == {"leg": "decode", "registered": "0"}


async def test_both_legs_are_reserved_in_one_step(tmp_path: Path) -> None:
    async with pairing(tmp_path, prefill=[prefilling()], decode=[decoding()]) as paired:
        paired.prefill[0].troubles.add("hang")
        call = paired.served.stub.Generate(streamed("x" * 100), timeout=15)
        await eventually(lambda: paired.prefill[0].stats.live)
        loads = {
            w.address: (w.load.in_flight, w.load.reserved_tokens, w.pressure.queued)
            for w in paired.served.app.registry
        }
        # The decode worker computes no prompt.
        assert loads == {
            paired.prefill[0].address: (1, 100, 100 + OVERHEAD_TOKENS),
            paired.decode[0].address: (1, 100, OVERHEAD_TOKENS),
        }
        call.cancel()
        await paired.at_rest()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_leg_that_nobody_has_room_for_is_shed(tmp_path: Path, leg: str) -> None:
    full: dict[str, Any] = {"max_num_seqs": 1}
    async with pairing(
        tmp_path,
        prefill=[prefilling(**full if leg == "prefill" else {})],
        decode=[decoding(**full if leg == "decode" else {})],
        overload_waiting=0,
    ) as paired:
        (paired.prefill if leg == "prefill" else paired.decode)[0].troubles.add("1*hang")
        call = paired.served.stub.Generate(streamed("x"), timeout=15)
        await eventually(lambda: any(w.engine.active for w in paired.served.workers))
        refused = await paired.served.refusal(tokenized("x"))
        assert (refused.code.name, refused.reason) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
        assert refused.about == {"leg": leg, "registered": "1", "overloaded": "1"}
        call.cancel()
        await paired.at_rest()
        model = paired.served.workers[0].options.model
        assert paired.served.metric("router_sheds_total", model=model) == 1


async def test_decode_legs_go_where_the_least_is_to_do(tmp_path: Path) -> None:
    sides = {"prefill": [prefilling()], "decode": [decoding()] * 2}
    async with pairing(tmp_path, **sides) as paired:
        for worker in paired.decode:
            worker.troubles.add("hang-after-chunks=1")
        calls = [paired.served.stub.Generate(streamed("x"), timeout=15) for _ in range(6)]
        for call in calls:
            await anext(aiter(call))
        assert sorted(w.stats.live for w in paired.decode) == [3, 3]
        for call in calls:
            call.cancel()
        await paired.at_rest()


# -- Without a pair


async def test_a_slow_prefill_is_not_taken_for_a_slow_decode_worker(tmp_path: Path) -> None:
    slow = prefilling(faults=("slow-first=700ms",))
    async with pairing(tmp_path, prefill=[slow], decode=[decoding()]) as paired:
        await paired.served.generate(streamed("x"))
        await paired.at_rest()
        prefill, decode = (paired.served.worker(position) for position in (0, 1))
        assert prefill.pressure.rate is not None
        assert decode.pressure.rate is None
        assert decode.pressure.queued == 0


async def test_short_prompts_are_computed_where_they_are_decoded(tmp_path: Path) -> None:
    sides = {"prefill": [prefilling()], "decode": [decoding()]}
    async with pairing(tmp_path, disagg_min_tokens=20, **sides) as paired:
        short, long = tokenized("x" * 19), tokenized("x" * 20)
        assert (await paired.served.route(short))["worker"] == paired.decode[0].address
        assert not sent(paired.decode[0]).HasField("kv_transfer_params_json")
        assert (await paired.served.route(long))["worker"] == paired.address()
        # A picture counts with all its tokens.
        picture = seeing(PICTURE, data_url(PHOTO))
        assert (await paired.served.route(picture))["worker"] == paired.address()
        for request, picked in ((short, paired.decode[0].address), (long, paired.address())):
            explained = await paired.served.admin.Explain(admin.ExplainRequest(request=request))
            assert explained.picked == picked
        await paired.at_rest()


async def test_logprobs_of_the_prompt_come_from_whoever_computed_it(tmp_path: Path) -> None:
    sides = {"prefill": [prefilling()], "decode": [decoding()]}
    async with pairing(tmp_path, **sides) as paired:
        (response,) = await paired.served.generate(tokenized("Hello", prompt_logprobs=1))
        assert len(response.complete.input_logprobs.token_logprobs) == len(encode("Hello"))
        assert paired.prefill[0].stats.calls["Generate"] == 0


async def test_beside_pairs_ordinary_workers_take_what_needs_no_pair(tmp_path: Path) -> None:
    sides = {"prefill": [prefilling()], "decode": [decoding()], "others": [SimOptions()]}
    async with pairing(tmp_path, disagg_min_tokens=20, **sides) as paired:
        for _ in range(4):
            await paired.served.say(tokenized("x"))
        alone = paired.served.workers[2]
        assert alone.stats.calls["Generate"] == paired.decode[0].stats.calls["Generate"] == 2
        assert (await paired.served.route(tokenized("x" * 20)))["worker"] == paired.address()


async def test_encode_workers_keep_media_in_the_router_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Mock()
    monkeypatch.setattr(pipeline, "_log", log)
    worker, encoder = SimWorker(), SimWorker()
    try:
        first, second = [await w.start("127.0.0.1:0") for w in (worker, encoder)]
        file = tmp_path / "workers.json"
        entries = [{"address": first}, {"address": second, "role": "encode"}]
        file.write_text(json.dumps({"workers": entries}))
        async with serving(discovery="file", discovery_file=str(file), ready=False) as served:
            await eventually(lambda: len(served.app.registry) == 2)
            await served.ready()
            for _ in range(3):
                route = await served.route(seeing(ASK, data_url(PHOTO)))
                assert (route["mode"], route["reason"]) == ("router", "epd_unsupported")
                assert route["worker"] == first
            assert encoder.stats.calls["Generate"] == 0
            told = [c for c in log.info.call_args_list if c.args == ("mm_processing",)]
            assert len(told) == 1
            assert told[0].kwargs["reason"] == "epd_unsupported"
    finally:
        await worker.stop(0)
        await encoder.stop(0)
