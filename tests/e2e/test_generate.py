"""Prompts through the whole router: what reaches a worker, and what comes back."""

from __future__ import annotations

import asyncio
from itertools import permutations
from unittest.mock import Mock

import grpc
import pytest

from router.request import pipeline
from router.wire import admin, common, engine
from tests.serving import (
    MODEL,
    PICTURE,
    Serving,
    chunk_ids,
    completes,
    data_url,
    eventually,
    image,
    refusal_of,
    seeing,
    serving,
    streamed,
    tokenized,
)
from workers.sim import SimOptions
from workers.sim.tokenizer import IMAGE_PAD, decode

TENSORS_ONLY = SimOptions(mm_processor="")
ALIKE = [
    "palette_203x151.png",
    "photo_640x480.jpg",
    "photo_1008x1344.webp",
    "rgba_203x151.png",
    "exif_6_24x16.jpg",
    "grey16_203x151.png",
    "pixel_1x1_rgba.png",
]


async def test_a_tokenized_prompt_is_answered() -> None:
    async with serving(SimOptions()) as served:
        said = await served.say(tokenized("What is a router?"))
        assert 'ends "What is a router?"' in said


async def test_a_text_prompt_reaches_the_worker_as_text() -> None:
    async with serving(SimOptions()) as served:
        said = await served.say(engine.GenerateRequest(text="Say hello"))
        assert 'ends "Say hello"' in said
        (received,) = served.workers[0].stats.received
        assert received.request.text == "Say hello"
        assert received.request.WhichOneof("input") == "text"


@pytest.mark.parametrize("style", ["python", "rust"])
async def test_a_stream_is_relayed_chunk_by_chunk(style: str) -> None:
    async with serving(SimOptions(style=style)) as served:  # type: ignore[arg-type]
        whole = await served.say(tokenized("Count"))
        responses = await served.generate(streamed("Count"))
        assert decode(chunk_ids(responses), special=False) == whole
        assert len(completes(responses)) == 1
        assert responses[-1].HasField("complete")
        assert responses[-1].complete.finish_reason == "stop"
        assert len(responses) > 10


async def test_every_choice_is_relayed_with_its_own_complete() -> None:
    async with serving(SimOptions()) as served:
        responses = await served.generate(streamed("Twice", n=2))
        assert sorted(c.index for c in completes(responses)) == [0, 1]
        assert chunk_ids(responses, 0) and chunk_ids(responses, 1)
        assert served.outcomes() == {("ok", ""): 1}


@pytest.mark.parametrize("name", ALIKE)
async def test_both_modes_give_the_same_answer_for_the_same_picture(name: str) -> None:
    request = seeing(f"{PICTURE}Describe it.", data_url(name))
    async with serving(TENSORS_ONLY) as router, serving(SimOptions()) as worker:
        here = await router.route(request), await router.say(request)
        there = await worker.route(request), await worker.say(request)
        assert (here[0]["mode"], here[0]["reason"]) == ("router", "auto_none")
        assert (there[0]["mode"], there[0]["reason"]) == ("worker", "auto_uniform")
        assert here[1] == there[1]
        assert "1 image." in here[1]
        assert router.workers[0].stats.received[-1].request.HasField("mm_inputs")
        assert worker.workers[0].stats.received[-1].request.HasField("media_refs")


async def test_several_pictures_of_different_size_keep_their_order() -> None:
    names = ["palette_203x151.png", "photo_640x480.jpg", "solid_61x43.bmp"]
    answers = set()
    async with serving(TENSORS_ONLY) as router, serving(SimOptions()) as worker:
        for order in permutations(names):
            request = seeing("".join([PICTURE] * 3) + "Compare.", *map(data_url, order))
            here, there = await router.say(request), await worker.say(request)
            assert here == there
            answers.add(here)
            batch = router.workers[0].stats.received[-1].request.mm_inputs
            offsets = [r.offset for r in batch.mm_placeholders]
            assert offsets == sorted(offsets)
            assert len(set(batch.mm_hashes)) == 3
    assert len(answers) == 6


async def test_the_same_picture_twice_is_two_items_with_one_hash() -> None:
    async with serving(TENSORS_ONLY) as served:
        url = data_url("palette_203x151.png")
        said = await served.say(seeing(PICTURE * 2, url, url))
        assert "2 images" in said
        batch = served.workers[0].stats.received[-1].request.mm_inputs
        assert len(batch.mm_placeholders) == 2
        assert len(batch.mm_hashes) == 2
        assert len(set(batch.mm_hashes)) == 1


async def test_inline_bytes_are_processed_in_the_router_even_by_capable_workers() -> None:
    async with serving(SimOptions()) as served:
        by_url = await served.say(seeing(PICTURE, data_url("palette_203x151.png")))
        request = seeing(PICTURE)
        request.media_refs.items.add(modality=common.IMAGE, data=image("palette_203x151.png"))
        route = await served.route(request)
        assert (route["mode"], route["reason"]) == ("router", "plan_not_forwardable")
        assert await served.say(request) == by_url


async def test_a_picture_is_shrunk_as_its_hint_says() -> None:
    async with serving(SimOptions()) as served:
        request = seeing(PICTURE, data_url("photo_640x480.jpg"))
        request.media_refs.items[0].hints.max_long_side_pixels = 320
        said = await served.say(request)
        assert "640x480" not in said
        assert "320x" in said
        (received,) = served.workers[0].stats.received
        assert received.request.HasField("mm_inputs")


async def test_extension_fields_do_not_reach_a_worker_in_either_mode() -> None:
    async with serving(TENSORS_ONLY) as router, serving(SimOptions()) as worker:
        for served in (router, worker):
            text = tokenized("x")
            text.router.model = MODEL
            text.router.routing_key = "somebody"
            seen = seeing(PICTURE, data_url("palette_203x151.png"))
            seen.router.model = MODEL
            seen.router.mm_processing = engine.AUTO
            hinted = seeing(PICTURE, data_url("palette_203x151.png"))
            hinted.media_refs.items[0].hints.max_long_side_pixels = 64
            inline = seeing(PICTURE)
            inline.media_refs.items.add(modality=common.IMAGE, data=image("palette_203x151.png"))
            for request in (text, seen, hinted, inline):
                await served.generate(request)
            assert len(served.workers[0].stats.received) == 4
            assert served.workers[0].stats.with_extensions == 0


def with_unknown_field(message: bytes, number: int, value: bytes) -> bytes:
    tag = number << 3 | 2
    encoded = bytearray()
    while tag > 0x7F:
        encoded.append(tag & 0x7F | 0x80)
        tag >>= 7
    encoded.append(tag)
    return message + bytes(encoded) + bytes([len(value)]) + value


@pytest.mark.parametrize("form", ["text", "reference", "picture"])
async def test_fields_of_a_newer_contract_survive_the_way_in(form: str) -> None:
    options = TENSORS_ONLY if form == "picture" else SimOptions()
    request = tokenized("x") if form == "text" else seeing(PICTURE, data_url("solid_61x43.bmp"))
    async with serving(options) as served:
        arrived: list[engine.GenerateRequest] = []
        generate = served.workers[0].servicer._engine.generate

        async def look(request: engine.GenerateRequest, *rest: object) -> None:
            arrived.append(request)
            await generate(request, *rest)  # type: ignore[arg-type]

        served.workers[0].servicer._engine.generate = look  # type: ignore[assignment]
        raw = with_unknown_field(request.SerializeToString(), 77, b"from the future")
        call = served.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(raw, timeout=15)
        assert [r async for r in call]
        assert b"from the future" in arrived[0].SerializeToString()


async def test_fields_of_a_newer_contract_survive_the_way_back() -> None:
    async with serving(SimOptions()) as served:
        engine_ = served.workers[0].servicer._engine
        plain = engine_._speak

        async def speak(speech: object, trouble: object, send: object) -> None:
            async def with_more(response: engine.GenerateResponse) -> None:
                raw = response.SerializeToString()
                raw = with_unknown_field(raw, 77, b"from the future")
                await send(engine.GenerateResponse.FromString(raw))  # type: ignore[operator]

            await plain(speech, trouble, with_more)  # type: ignore[arg-type]

        engine_._speak = speak  # type: ignore[assignment, method-assign]
        responses = await served.generate(streamed("x"))
        assert all(b"from the future" in r.SerializeToString() for r in responses)
        assert served.outcomes() == {("ok", ""): 1}


async def test_a_worker_sees_an_id_of_its_own_for_every_attempt() -> None:
    async with serving(SimOptions(faults=("2*fail=UNAVAILABLE",))) as served:
        await served.generate(tokenized("x", "mine"))
        ids = [r.request.request_id for r in served.workers[0].stats.received]
        assert len(ids) == 3
        assert len(set(ids)) == 3
        assert all(i.startswith("mine") and i != "mine" for i in ids)


async def test_one_request_id_twice_at_once_disturbs_nobody() -> None:
    async with serving(SimOptions(style="rust")) as served:
        worker = served.workers[0]
        first = served.stub.Generate(streamed("[[sim: hang-after-chunks=2]]", "a"), timeout=15)
        await anext(aiter(first))
        second = served.stub.Generate(streamed("[[sim: slow-first=300ms]]", "a"), timeout=15)
        reading = asyncio.create_task(_all(second))
        await eventually(lambda: worker.stats.live == 2)
        first.cancel()
        assert completes(await reading)
        await served.at_rest()
        assert served.outcomes() == {("ok", ""): 1, ("client_cancelled", ""): 1}


async def _all(
    call: grpc.aio.UnaryStreamCall[object, engine.GenerateResponse],
) -> list[engine.GenerateResponse]:
    return [response async for response in call]


async def test_an_abort_ends_the_request_at_the_worker_that_runs_it() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        calls = [
            served.stub.Generate(streamed("[[sim: hang-after-chunks=2]]", name), timeout=15)
            for name in ("a", "b")
        ]
        for call in calls:
            await anext(aiter(call))
        await served.stub.Abort(engine.AbortRequest(request_ids=["a", "nobody"]), timeout=10)
        ended = completes(await _all(calls[0]))
        assert [c.finish_reason for c in ended] == ["abort"]
        assert sum(w.stats.live for w in served.workers) == 1
        assert sum(w.stats.aborted for w in served.workers) == 1
        calls[1].cancel()
        await served.at_rest()


async def test_an_abort_of_an_unknown_id_is_no_error_and_asks_no_worker() -> None:
    async with serving(SimOptions()) as served:
        await served.stub.Abort(engine.AbortRequest(request_ids=["nobody"]), timeout=10)
        assert served.workers[0].stats.calls["Abort"] == 0


async def test_an_embedding_that_is_refused_unread_counts_as_its_models() -> None:
    async with serving(SimOptions()) as served:
        refused = await refusal_of(served.stub.Embed(engine.EmbedRequest(), timeout=10))
        assert refused.reason == "INVALID_REQUEST"
        await served.at_rest()
        (ended,) = served.samples("router_requests_total")
        assert (ended.labels["model"], ended.labels["reason"]) == (MODEL, "invalid_request")


async def test_an_embedding_comes_back_as_the_worker_gave_it() -> None:
    async with serving(SimOptions()) as served:
        request = engine.EmbedRequest(
            request_id="e", tokenized=engine.TokenizedInput(input_ids=[1, 2, 3])
        )
        answer = await served.stub.Embed(request, timeout=10)
        assert answer.embedding_dim == len(answer.embedding) > 0
        assert answer.prompt_tokens == 3
        await served.at_rest()
        assert served.outcomes() == {("ok", ""): 1}


async def test_requests_take_turns_among_equal_workers() -> None:
    async with serving(*[SimOptions()] * 3) as served:
        for _ in range(9):
            await served.generate(tokenized("x"))
        assert [w.stats.calls["Generate"] for w in served.workers] == [3, 3, 3]


async def test_two_models_are_told_apart_by_their_names() -> None:
    async with serving(SimOptions(), SimOptions(model="other", model_type="llama")) as served:
        request = tokenized("x")
        request.router.model = "other"
        await served.generate(request)
        assert served.workers[1].stats.calls["Generate"] == 1
        await served.generate(tokenized("x"), metadata=[("x-model", MODEL)])
        assert served.workers[0].stats.calls["Generate"] == 1
        answer = await served.stub.GetModelInfo(
            engine.GetModelInfoRequest(), metadata=(("x-model", "other"),), timeout=10
        )
        assert answer.served_model_name == "other"


async def test_a_mixed_fleet_processes_in_the_router_and_uses_every_worker() -> None:
    async with serving(SimOptions(), TENSORS_ONLY) as served:
        request = seeing(PICTURE, data_url("solid_61x43.bmp"))
        routes = [await served.route(request) for _ in range(4)]
        assert {(r["mode"], r["reason"]) for r in routes} == {("router", "auto_mixed")}
        assert [w.stats.calls["Generate"] for w in served.workers] == [2, 2]


async def test_an_unhealthy_worker_does_not_switch_the_mode() -> None:
    async with serving(SimOptions(), TENSORS_ONLY) as served:
        await served.workers[1].set_serving(False)
        await eventually(lambda: served.worker(1).state.value == "unhealthy")
        route = await served.route(seeing(PICTURE, data_url("solid_61x43.bmp")))
        assert route["reason"] == "auto_mixed"


@pytest.mark.parametrize("asked", ["router", "worker"])
async def test_a_request_may_choose_its_mode_where_that_is_allowed(asked: str) -> None:
    override = {"router": engine.ROUTER, "worker": engine.WORKER}[asked]
    for allowed in (True, False):
        async with serving(SimOptions(), allow_mm_override=allowed) as served:
            request = seeing(PICTURE, data_url("solid_61x43.bmp"))
            request.router.mm_processing = override
            route = await served.route(request)
            expected = (asked, "override") if allowed else ("worker", "auto_uniform")
            assert (route["mode"], route["reason"]) == expected
            assert route.get("ignored") == (None if allowed else "mm_processing")
            asking = admin.ExplainRequest(request=request)
            explained = await served.admin.Explain(asking, timeout=15)
            assert explained.mode == expected[0]
            reason, _, ignored = explained.reason.partition("; ")
            assert reason == expected[1]
            assert ("--allow-mm-override" in ignored) is not allowed
            counted = {"model": MODEL, "mode": expected[0], "reason": expected[1]}
            assert served.metric("router_mm_processing_total", **counted) == 1


async def test_what_one_request_asks_for_is_no_change_of_where_media_become_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Mock()
    monkeypatch.setattr(pipeline, "_log", log)
    async with serving(SimOptions(), allow_mm_override=True) as served:
        for asked in (engine.AUTO, engine.ROUTER, engine.AUTO):
            request = seeing(PICTURE, data_url("solid_61x43.bmp"))
            request.router.mm_processing = asked
            await served.generate(request)
        hinted = seeing(PICTURE, data_url("solid_61x43.bmp"))
        hinted.media_refs.items[0].hints.max_long_side_pixels = 40
        assert (await served.route(hinted))["reason"] == "plan_not_forwardable"
        await served.generate(seeing(PICTURE, data_url("solid_61x43.bmp")))
    told = [c.kwargs["reason"] for c in log.info.call_args_list if c.args == ("mm_processing",)]
    assert told == ["auto_uniform"]


async def test_pixels_are_made_as_each_kind_of_worker_wants_them() -> None:
    answers = set()
    for normalizes in (True, False):
        options = SimOptions(mm_processor="", device_normalize=normalizes)
        async with serving(options) as served:
            answers.add(await served.say(seeing(PICTURE, data_url("palette_203x151.png"))))
            batch = served.workers[0].stats.received[0].request.mm_inputs
            assert batch.pixel_values.dtype == ("uint8" if normalizes else "bfloat16")
    # The means of levels survive normalising up to bfloat16's rounding; sizes do exactly.
    assert all("grid 1x" in answer for answer in answers)


async def test_where_normalise_rules_are_mixed_tensors_go_only_to_workers_of_their_rule() -> None:
    raw, normal = SimOptions(mm_processor=""), SimOptions(mm_processor="", device_normalize=False)
    async with serving(raw, raw, normal) as served:
        for _ in range(6):
            await served.generate(seeing(PICTURE, data_url("solid_61x43.bmp")))
        assert [w.stats.calls["Generate"] for w in served.workers] == [3, 3, 0]


async def test_a_forwarded_picture_is_weighed_at_its_expanded_length(served: Serving) -> None:
    request = seeing(f"[[sim: hang]]{PICTURE}", data_url("photo_640x480.jpg"))
    call = served.stub.Generate(request, timeout=15)
    await eventually(lambda: served.workers[0].stats.live == 1)
    assert served.worker().load.reserved_tokens > 300
    anchors = [i for i in request.tokenized.input_ids if i == IMAGE_PAD]
    assert len(anchors) == 1
    call.cancel()
    await served.at_rest()
