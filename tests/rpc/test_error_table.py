"""Every reason as a client meets it, provoked through a real server and simulated workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from router.faults import Fault, Reason
from router.request.failure import PassThrough
from router.rpc.errors import DOMAIN, TABLE, wire_error
from router.wire import common, engine
from tests.media.server import fixed, raw, running
from tests.serving import (
    IMAGES,
    MODEL,
    PICTURE,
    Refusal,
    Serving,
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
from workers.sim import SimOptions
from workers.sim.tokenizer import IMAGE_PAD, encode

Code = grpc.StatusCode

SMALL = data_url("solid_61x43.bmp")
TENSORS_ONLY = SimOptions(mm_processor="")
TEXT_ONLY = SimOptions(model_type="llama")

# What no message may hold: object addresses, paths of this host, payloads, credentials.
LEAKS = re.compile(
    r"(?<!\d)0x[0-9a-f]{4,}|/(work|tmp|home|root|etc|usr)/|[A-Za-z0-9+/]{60,}|SECRET|u:p"
)


@dataclass(frozen=True)
class Case:
    """One way to a reason. `called` is how many worker calls it takes."""

    reason: Reason
    request: Callable[[], engine.GenerateRequest]
    workers: tuple[SimOptions, ...] = (SimOptions(),)
    settings: dict[str, Any] = field(default_factory=dict)
    called: int = 0
    breaker: str = "closed"
    about: dict[str, str] = field(default_factory=dict)
    name: str = ""


def without_prompt() -> engine.GenerateRequest:
    return engine.GenerateRequest(request_id="x")


def refs_and_tensors() -> engine.GenerateRequest:
    request = seeing(PICTURE, SMALL)
    request.mm_inputs.SetInParent()
    return request


def refs_with_text() -> engine.GenerateRequest:
    request = engine.GenerateRequest(text="look")
    request.media_refs.items.add(modality=common.IMAGE, url=SMALL)
    return request


def no_items() -> engine.GenerateRequest:
    request = tokenized("x")
    request.media_refs.SetInParent()
    return request


def without_modality() -> engine.GenerateRequest:
    request = tokenized(PICTURE)
    request.media_refs.items.add(url=SMALL)
    return request


def inline(name: str = "palette_203x151.png") -> engine.GenerateRequest:
    request = tokenized(PICTURE)
    request.media_refs.items.add(modality=common.IMAGE, data=image(name))
    return request


def hinted() -> engine.GenerateRequest:
    request = seeing(PICTURE, SMALL)
    request.media_refs.items[0].hints.max_long_side_pixels = 32
    return request


def unknown_mode() -> engine.GenerateRequest:
    request = tokenized("x")
    request.router.mm_processing = 9  # type: ignore[assignment]
    return request


def audio() -> engine.GenerateRequest:
    request = tokenized(PICTURE)
    request.media_refs.items.add(modality=common.AUDIO, url="data:audio/wav;base64,AAAA")
    return request


def for_model(name: str) -> engine.GenerateRequest:
    request = tokenized("x")
    request.router.model = name
    return request


def transfer() -> engine.GenerateRequest:
    request = tokenized("x")
    request.kv_transfer_params_json = '{"remote_host": "10.0.0.9", "remote_port": 9090}'
    return request


def ranked() -> engine.GenerateRequest:
    request = tokenized("x")
    request.data_parallel_rank = 0
    return request


def broken_tensors() -> engine.GenerateRequest:
    request = with_tensors(PICTURE, "palette_203x151.png")
    request.mm_inputs.mm_placeholders[0].length += 1
    return request


def text(directive: str = "", stream: bool = False) -> Callable[[], engine.GenerateRequest]:
    prompt = f"[[sim: {directive}]]" if directive else "x"
    return lambda: streamed(prompt) if stream else tokenized(prompt)


def picture(url: str, prompt: str = PICTURE) -> Callable[[], engine.GenerateRequest]:
    return lambda: seeing(prompt, url)


def file(name: str) -> Callable[[], engine.GenerateRequest]:
    return lambda: seeing(PICTURE, data_url(name))


R = Reason
STRICT = {"mm_processing": "worker"}
ONCE = {"retry_max_attempts": 1, "breaker_min_calls": 1}
CASES = [
    Case(R.INVALID_REQUEST, without_prompt, name="no prompt"),
    Case(R.INVALID_REQUEST, lambda: tokenized(""), name="empty prompt"),
    Case(R.INVALID_REQUEST, refs_and_tensors, name="refs and tensors"),
    Case(R.INVALID_REQUEST, refs_with_text, name="refs with text"),
    Case(R.INVALID_REQUEST, no_items, name="no items"),
    Case(R.INVALID_REQUEST, unknown_mode, name="no such mode"),
    Case(R.INVALID_REQUEST, without_modality, about={"index": "0"}, name="no modality"),
    Case(R.PROMPT_TOO_LONG, lambda: tokenized("x" * 100), (SimOptions(max_context=100),)),
    Case(
        R.PROMPT_TOO_LONG,
        lambda: engine.GenerateRequest(text="x" * 100),
        (SimOptions(max_context=100, style="rust"),),
        name="as text",
    ),
    Case(
        R.PROMPT_TOO_LONG,
        file("photo_640x480.jpg"),
        (SimOptions(max_context=100, mm_processor=""),),
        name="by pictures",
    ),
    Case(
        R.ANCHOR_MISMATCH,
        picture(SMALL, PICTURE * 2),
        about={"found": "2", "items": "1"},
        name="worker",
    ),
    Case(R.ANCHOR_MISMATCH, picture(SMALL, PICTURE * 2), (TENSORS_ONLY,), name="router"),
    Case(R.ANCHOR_MISMATCH, picture(SMALL, "none"), name="none"),
    Case(R.ANCHOR_MISMATCH, lambda: tokenized(PICTURE), name="no media"),
    Case(
        R.ANCHOR_MISMATCH,
        lambda: engine.GenerateRequest(text=f"{PICTURE} and <|video_pad|>"),
        about={"found": "2", "items": "0"},
        name="in a text",
    ),
    Case(R.MALFORMED_TENSORS, broken_tensors, about={"check": "length"}),
    Case(
        R.TOO_MANY_MEDIA_ITEMS,
        lambda: seeing(PICTURE * 3, SMALL, SMALL, SMALL),
        (SimOptions(item_limits=(("image", 2),)),),
    ),
    Case(
        R.MEDIA_ITEM_OVER_ENCODER_BUDGET,
        file("photo_640x480.jpg"),
        (SimOptions(mm_processor="", encoder_budget=100),),
    ),
    *(
        Case(R.MEDIA_URL_INVALID, picture(url), (options,), name=f"{url!r} {mode}")
        for url in ("", "no scheme", "http://u:p@example.com/x.png?token=SECRET", "http://h\\@x/")
        for mode, options in (("worker", SimOptions()), ("router", TENSORS_ONLY))
    ),
    Case(
        R.MEDIA_SCHEME_UNSUPPORTED, picture("ftp://example.com/x"), (TENSORS_ONLY,), name="router"
    ),
    Case(R.MEDIA_SCHEME_UNSUPPORTED, picture("ftp://example.com/x"), name="worker"),
    Case(R.MEDIA_HOST_FORBIDDEN, picture("http://127.0.0.1:1/x?token=SECRET"), name="worker"),
    Case(
        R.MEDIA_HOST_FORBIDDEN,
        picture("http://169.254.169.254/latest?token=SECRET"),
        (TENSORS_ONLY,),
        name="router",
    ),
    Case(
        R.FILE_FORBIDDEN,
        picture("file:///etc/passwd"),
        (SimOptions(local_root=IMAGES),),
        name="worker",
    ),
    Case(R.FILE_FORBIDDEN, picture("file:///etc/passwd"), (TENSORS_ONLY,), name="router"),
    Case(R.MEDIA_DECODE_FAILED, file("bad_truncated_half.png"), (TENSORS_ONLY,)),
    Case(R.MEDIA_FORMAT_UNSUPPORTED, file("bad_vector.svg"), (TENSORS_ONLY,), name="svg"),
    Case(R.MEDIA_FORMAT_UNSUPPORTED, file("bad_heic_magic.heic"), (TENSORS_ONLY,), name="heic"),
    Case(R.MEDIA_TOO_LARGE, file("bad_header_20000x20000.png"), (TENSORS_ONLY,), name="pixels"),
    Case(
        R.MEDIA_TOO_LARGE,
        inline,
        (TENSORS_ONLY,),
        {"media_max_bytes": 1000},
        about={"index": "0", "limit": "1000"},
        name="bytes",
    ),
    Case(R.MEDIA_ASPECT_RATIO, file("over200_2500x10.png"), (TENSORS_ONLY,)),
    Case(
        R.MEDIA_REF_TOO_LARGE,
        file("photo_640x480.jpg"),
        settings={"media_max_bytes": 1000},
        name="worker",
    ),
    Case(
        R.MEDIA_FETCH_FAILED,
        picture("http://127.0.0.1:1/x.png?token=SECRET"),
        (TENSORS_ONLY,),
        {"media_allow_private_hosts": True},
        name="refused",
    ),
    Case(
        R.MULTIMODAL_HINT_UNSUPPORTED_IN_WORKER_MODE,
        hinted,
        settings=STRICT,
        about={"index": "0", "part": "hint max_long_side_pixels"},
    ),
    Case(R.MULTIMODAL_UNSUPPORTED_PART, inline, settings=STRICT, about={"part": "inline bytes"}),
    Case(
        R.MULTIMODAL_UNSUPPORTED_PART, audio, settings=STRICT, about={"part": "audio"}, name="audio"
    ),
    Case(
        R.MULTIMODAL_WORKER_PROCESSING_UNSUPPORTED_MODEL,
        picture(SMALL),
        (TEXT_ONLY,),
        STRICT,
    ),
    Case(R.MULTIMODAL_NOT_SUPPORTED, picture(SMALL), (TEXT_ONLY,), name="text model"),
    Case(R.MULTIMODAL_NOT_SUPPORTED, audio, about={"index": "0"}, name="audio"),
    Case(
        R.MEDIA_REF_SCHEME_NOT_ACCEPTED,
        picture(SMALL),
        (SimOptions(mm_schemes=("https",)),),
        STRICT,
    ),
    Case(R.NO_MEDIA_REF_CAPABLE_WORKER, picture(SMALL), (TENSORS_ONLY,), STRICT),
    Case(R.MODEL_NOT_FOUND, lambda: for_model("nobody"), about={"models": MODEL}),
    Case(
        R.MODEL_REQUIRED,
        text(),
        (SimOptions(), SimOptions(model="other")),
        about={"models": f"other, {MODEL}"},
    ),
    Case(
        R.MESSAGE_TOO_LARGE,
        file("photo_640x480.jpg"),
        (TENSORS_ONLY,),
        {"max_message_bytes": 1 << 20},
    ),
    Case(R.TRANSFER_PARAMS_FORBIDDEN, transfer, about={"field": "kv_transfer_params_json"}),
    Case(R.TRANSFER_PARAMS_FORBIDDEN, ranked, about={"field": "data_parallel_rank"}, name="rank"),
    Case(R.WORKER_UNAVAILABLE, text("fail=UNAVAILABLE"), settings=ONCE, called=1, breaker="open"),
    Case(
        R.WORKER_UNAVAILABLE,
        text("constraint-failed"),
        settings=ONCE,
        called=1,
        name="constraint failed",
    ),
    Case(R.WORKER_SATURATED, text("saturate"), settings=ONCE, called=1),
    Case(
        R.WORKER_SATURATED,
        text("fail=RESOURCE_EXHAUSTED"),
        settings=ONCE,
        called=1,
        name="resource exhausted",
    ),
    Case(R.WORKER_INTERNAL, text("fail=INTERNAL"), settings=ONCE, called=1, breaker="open"),
    Case(R.WORKER_INTERNAL, text("die"), settings=ONCE, called=1, breaker="open", name="dead"),
    Case(
        R.WORKER_STREAM_BROKEN,
        text("fail-after-chunks=2", stream=True),
        settings=ONCE,
        called=1,
        breaker="open",
    ),
    Case(
        R.WORKER_STREAM_BROKEN,
        text("end-without-complete", stream=True),
        settings=ONCE,
        called=1,
        breaker="open",
        name="no complete",
    ),
    Case(
        R.WORKER_TIMEOUT,
        text("hang"),
        settings={**ONCE, "first_output_timeout": "2s"},
        called=1,
        breaker="open",
        about={"limit": "first_output"},
    ),
    Case(
        R.WORKER_TIMEOUT,
        text("hang-after-chunks=2", stream=True),
        settings={**ONCE, "idle_timeout": "100ms"},
        called=1,
        breaker="open",
        about={"limit": "idle"},
        name="idle",
    ),
    Case(
        R.WORKER_TIMEOUT,
        text("fail=DEADLINE_EXCEEDED"),
        settings=ONCE,
        called=1,
        breaker="open",
        about={"limit": "worker"},
        name="the worker's own",
    ),
    Case(
        R.WORKER_STREAM_BROKEN,
        text("fail-after-chunks=2:DEADLINE_EXCEEDED", stream=True),
        settings=ONCE,
        called=1,
        breaker="open",
        name="a limit of the worker's own",
    ),
    Case(R.MEDIA_DECODE_FAILED, file("bad_truncated_half.png"), called=1, name="worker"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.reason.name} {c.name}".strip())
async def test_a_reason_is_told_and_counted_as_the_table_says(case: Case) -> None:
    async with serving(*case.workers, **case.settings) as served:
        refused = await served.refusal(case.request())
        await _check(served, refused, case.reason, case.called, case.breaker)
        assert case.about.items() <= refused.about.items()


async def _check(
    served: Serving, refused: Refusal, reason: Reason, called: int = 0, breaker: str = "closed"
) -> None:
    row = TABLE[reason]
    assert refused.reason == reason.value
    assert refused.domain == "mmrouter"
    assert refused.code is row.code
    assert (refused.retry_after is not None) == (row.retry_after is not None)
    assert refused.message and "\n" not in refused.message and len(refused.message) < 300
    for told in (refused.message, *refused.about.values()):
        assert not LEAKS.search(told), told
    await served.at_rest()
    assert served.outcomes() == {(row.outcome, reason.name.lower()): 1}
    assert sum(w.stats.calls["Generate"] for w in served.workers) == called
    assert {w.breaker.state.value for w in served.app.registry} <= {breaker}


@pytest.mark.parametrize("mode", ["router", "worker"])
@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("404 Not Found", R.MEDIA_NOT_FOUND),
        ("403 Forbidden", R.MEDIA_NOT_FOUND),
        ("500 Oops", R.MEDIA_FETCH_FAILED),
    ],
)
async def test_what_the_media_host_says_reaches_the_client_by_class(
    mode: str, status: str, reason: Reason
) -> None:
    options = TENSORS_ONLY if mode == "router" else SimOptions()
    async with running() as host, serving(options, media_allow_private_hosts=True) as served:
        host.routes["/x.png"] = fixed(b"SECRET", status=status)
        refused = await served.refusal(seeing(PICTURE, host.url("/x.png?token=SECRET")))
        if mode == "router":
            await _check(served, refused, reason)
        else:  # the worker's own answer, in its own words
            assert refused.code in (Code.INVALID_ARGUMENT, Code.UNAVAILABLE)
            assert served.worker().breaker._failures == 0


async def test_a_media_host_that_hangs_up_is_a_failed_fetch() -> None:
    async with running() as host, serving(TENSORS_ONLY, media_allow_private_hosts=True) as served:
        host.routes["/x.png"] = raw(b"")
        refused = await served.refusal(seeing(PICTURE, host.url("/x.png")))
        await _check(served, refused, R.MEDIA_FETCH_FAILED)


async def test_a_request_whose_time_ends_at_a_media_host_blames_no_worker() -> None:
    settings = {"media_allow_private_hosts": True, "request_timeout": "500ms"}
    async with running() as host, serving(TENSORS_ONLY, **settings) as served:
        host.routes["/x.png"] = raw(b"", close=False)
        request = seeing(PICTURE * 2, SMALL, host.url("/x.png"))
        refused = await served.refusal(request)
        await _check(served, refused, R.MEDIA_FETCH_TIMEOUT)
        assert refused.about == {"index": "1", "limit": "total"}


async def test_without_workers_nobody_is_available() -> None:
    async with serving() as served:
        refused = await served.refusal(tokenized("x"))
        await _check(served, refused, R.NO_AVAILABLE_WORKER)
        assert refused.about == {"registered": "0"}


@pytest.mark.parametrize("form", ["text", "picture"])
async def test_unhealthy_and_draining_workers_are_counted_by_cause(form: str) -> None:
    async with serving(SimOptions(), SimOptions(), SimOptions()) as served:
        await served.workers[0].set_serving(False)
        await served.workers[1].set_serving(False)
        await eventually(
            lambda: [w.state.value for w in served.app.registry][:2] == ["unhealthy"] * 2
        )
        call = served.stub.Generate(streamed("[[sim: hang]]"), timeout=60)
        await eventually(lambda: any(w.stats.live for w in served.workers))
        busy = next(w for w in served.app.registry if w.load.in_flight)
        served.app.fleet.drain(busy)
        request = tokenized("x") if form == "text" else seeing(PICTURE, SMALL)
        refused = await served.refusal(request)
        assert refused.reason == "NO_AVAILABLE_WORKER"
        causes = {k: v for k, v in refused.about.items() if k != "registered"}
        assert sum(map(int, causes.values())) == 3
        assert set(causes) <= {"unhealthy", "draining"}
        call.cancel()


@pytest.mark.parametrize("form", ["text", "picture", "strict"])
async def test_overloaded_workers_shed_once_a_request(form: str) -> None:
    # One runs, one waits there: that is where a worker counts as overloaded.
    options = SimOptions(max_num_seqs=1, max_waiting=5)
    settings = {"mm_processing": "worker"} if form == "strict" else {}
    async with serving(options, TENSORS_ONLY, overload_waiting=1, **settings) as served:
        capable = served.workers[0]
        await served.app.fleet.remove(served.worker(1))
        calls = [served.stub.Generate(streamed("[[sim: hang]]"), timeout=60) for _ in range(2)]
        await eventually(lambda: capable.scheduler.waiting == 1)
        await eventually(lambda: served.worker(0).load.in_flight == 2)
        if form == "strict":
            # A worker that is free and takes no references changes nothing.
            served.app.fleet.add(served.workers[1].address)
            await served.ready()
        request = tokenized("x") if form == "text" else seeing(PICTURE, SMALL)
        refused = await served.refusal(request)
        assert refused.reason == "OVERLOADED"
        assert refused.code is Code.RESOURCE_EXHAUSTED
        assert refused.retry_after is not None and refused.retry_after >= timedelta(seconds=1)
        await eventually(lambda: served.outcomes() == {("overloaded", "overloaded"): 1})
        assert sum(s.value for s in served.samples("router_sheds_total")) == 1
        for call in calls:
            call.cancel()


async def test_the_pause_that_a_worker_wishes_is_asked_of_the_client() -> None:
    async with serving(SimOptions(), **ONCE) as served:
        refused = await served.refusal(tokenized("[[sim: fail=UNAVAILABLE, pushback=9s]]"))
        await _check(served, refused, R.WORKER_UNAVAILABLE, 1, "open")
        assert refused.retry_after == timedelta(seconds=9)
        # Where a retry cannot help, there is none to ask for.
    async with serving(SimOptions(), **ONCE) as served:
        refused = await served.refusal(tokenized("[[sim: fail=INTERNAL, pushback=9s]]"))
        await _check(served, refused, R.WORKER_INTERNAL, 1, "open")


async def test_a_full_queue_is_told_at_once() -> None:
    async with serving(SimOptions(), max_concurrent=1, queue_size=0) as served:
        call = served.stub.Generate(streamed("[[sim: hang]]"), timeout=15)
        await eventually(lambda: served.workers[0].stats.live == 1)
        refused = await served.refusal(tokenized("x"))
        assert refused.reason == "ADMISSION_FULL"
        assert refused.code is Code.RESOURCE_EXHAUSTED
        assert refused.retry_after is not None
        # Health and metadata need no place.
        assert await served.health() == 1
        await served.stub.GetModelInfo(engine.GetModelInfoRequest(), timeout=5)
        call.cancel()
        await served.at_rest()
        assert served.outcomes()[("overloaded", "admission_full")] == 1


async def test_a_full_media_budget_is_told_with_a_hint() -> None:
    async with serving(TENSORS_ONLY, media_budget_bytes="64KiB", media_cache_bytes=0) as served:
        refused = await served.refusal(seeing(PICTURE, data_url("photo_640x480.jpg")))
        assert refused.reason in ("MEDIA_BUDGET_FULL", "MEDIA_TOO_LARGE")
        assert served.workers[0].stats.calls["Generate"] == 0


async def test_bytes_that_are_no_request_are_invalid() -> None:
    async with serving(SimOptions()) as served:
        call = served.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        refused = await refusal_of(call(b"\xff\xff\xff", timeout=10).read())
        await _check(served, refused, R.INVALID_REQUEST)
        for method in ("Abort", "GetLoads", "FlushCache", "Embed"):
            unary = served.channel.unary_unary(f"/vllm.grpc.engine.VllmEngine/{method}")
            refused = await refusal_of(unary(b"\xff\xff\xff", timeout=10))
            assert refused.reason == "INVALID_REQUEST", method


async def test_our_own_fault_is_internal_and_says_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(SimOptions()) as served:

        def fail(*_: object) -> None:
            raise RuntimeError("SECRET at 0xdeadbeef in /root/x.py")

        monkeypatch.setattr(served.app.pipeline.decider, "decide", fail)
        refused = await served.refusal(tokenized("x", "my-id"))
        await _check(served, refused, R.INTERNAL)
        assert refused.route["request-id"] == "my-id"


async def test_a_prompt_too_long_is_told_with_its_length_and_the_limit() -> None:
    async with serving(SimOptions(max_context=100)) as served:
        refused = await served.refusal(tokenized("x" * 100))
        assert "100" in refused.message
        assert {"100"} <= set(refused.about.values())


async def test_too_many_items_are_told_with_their_number_and_the_limit() -> None:
    async with serving(SimOptions(item_limits=(("image", 2),))) as served:
        refused = await served.refusal(seeing(PICTURE * 3, SMALL, SMALL, SMALL))
        assert "3" in refused.message and "2" in refused.message


async def test_a_scheme_that_is_not_accepted_is_named() -> None:
    async with serving(SimOptions(mm_schemes=("https",)), mm_processing="worker") as served:
        refused = await served.refusal(seeing(PICTURE, SMALL))
        assert "data" in refused.message


async def test_tensors_of_the_other_normalise_rule_are_the_clients_fault() -> None:
    async with serving(SimOptions(device_normalize=False)) as served:
        request = with_tensors(PICTURE, "palette_203x151.png")  # raw levels
        refused = await served.refusal(request)
        assert refused.code is Code.INVALID_ARGUMENT
        assert refused.reason == "MALFORMED_TENSORS"
        assert served.workers[0].stats.calls["Generate"] == 0


# -- The table itself


def test_the_table_has_a_row_for_every_reason() -> None:
    assert set(TABLE) == set(Reason)


@pytest.mark.parametrize("reason", list(Reason), ids=lambda r: r.name)
def test_a_row_becomes_status_details(reason: Reason) -> None:
    row = TABLE[reason]
    failed = wire_error(Fault(reason, "message", metadata={"index": "3"}))
    assert failed.code is row.code
    assert failed.reason == reason.name.lower()
    refused = Refusal.of(_error(failed.code, failed.message, failed.trailers))
    assert (refused.reason, refused.domain) == (reason.value, DOMAIN)
    assert refused.about == {"index": "3"}
    assert (refused.retry_after is None) == (row.retry_after is None)
    assert row.outcome in {
        "client_fault",
        "overloaded",
        "unavailable",
        "worker_failed",
        "internal",
    }


def _error(code: Code, message: str, trailers: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), message)


def test_a_faults_own_wait_replaces_the_tables() -> None:
    failed = wire_error(Fault(R.OVERLOADED, "m", retry_after=2.5))
    refused = Refusal.of(_error(failed.code, failed.message, failed.trailers))
    assert refused.retry_after == timedelta(seconds=2.5)


def test_a_wait_that_no_duration_holds_is_told_as_the_longest() -> None:
    failed = wire_error(Fault(R.WORKER_UNAVAILABLE, "m", retry_after=1e297))
    status = status_pb2.Status.FromString(dict(failed.trailers)["grpc-status-details-bin"])
    hint = error_details_pb2.RetryInfo()
    assert status.details[1].Unpack(hint)
    assert hint.retry_delay.seconds == 315_576_000_000


def test_a_retry_that_cannot_help_is_never_hinted_at() -> None:
    failed = wire_error(Fault(R.INVALID_REQUEST, "m", retry_after=2.5))
    refused = Refusal.of(_error(failed.code, failed.message, failed.trailers))
    assert refused.retry_after is None


def test_a_workers_own_answer_has_no_error_info() -> None:
    failed = wire_error(PassThrough(Code.OUT_OF_RANGE, "said the worker"))
    assert (failed.code, failed.message) == (Code.OUT_OF_RANGE, "said the worker")
    assert failed.trailers == ()
    assert (failed.outcome, failed.reason) == ("client_fault", "worker_refused")


# -- The guard: requests that would kill an engine


def killers() -> dict[str, Callable[[engine.GenerateRequest], object]]:
    def placeholder_past_the_end(r: engine.GenerateRequest) -> None:
        r.mm_inputs.mm_placeholders[0].offset = len(r.tokenized.input_ids)

    def fewer_patches(r: engine.GenerateRequest) -> None:
        pixels = r.mm_inputs.pixel_values
        pixels.inline = pixels.inline[: (pixels.shape[0] - 1) * pixels.shape[1]]
        pixels.shape[0] -= 1

    def grid(r: engine.GenerateRequest, rows: int, name: str = "image_grid_thw") -> None:
        tensor = r.mm_inputs.model_specific_tensors[name]
        values = bytearray(tensor.inline)
        at = 8 if name == "image_grid_thw" else 0
        value = int.from_bytes(values[at : at + 8], "little", signed=True) + rows
        values[at : at + 8] = value.to_bytes(8, "little", signed=True)
        tensor.inline = bytes(values)

    def narrow(r: engine.GenerateRequest) -> None:
        pixels = r.mm_inputs.pixel_values
        pixels.shape[1] //= 2
        pixels.shape[0] *= 2

    def remote(r: engine.GenerateRequest) -> None:
        r.mm_inputs.pixel_values.shm.name = "psm_other"

    def set_length(by: int) -> Callable[[engine.GenerateRequest], None]:
        def change(r: engine.GenerateRequest) -> None:
            r.mm_inputs.mm_placeholders[0].length += by

        return change

    return {
        "placeholder one too long": set_length(1),
        "placeholder one too short": set_length(-1),
        "placeholder empty": lambda r: setattr(r.mm_inputs.mm_placeholders[0], "length", 0),
        "placeholder past the end": placeholder_past_the_end,
        "fewer patches than the grid": fewer_patches,
        "grid larger than the patches": lambda r: grid(r, 2),
        "grid not a multiple of the merge": lambda r: grid(r, 1),
        "grid negative": lambda r: grid(r, -1000),
        "grid near the end of int64": lambda r: grid(r, 2**62),
        "patches_per_image off": lambda r: grid(r, 1, "patches_per_image"),
        "wrong pixel dimension": narrow,
        "grid missing": lambda r: r.mm_inputs.model_specific_tensors.pop("image_grid_thw"),
        "sizes missing": lambda r: r.mm_inputs.model_specific_tensors.pop("patches_per_image"),
        "no flat key": lambda r: r.mm_inputs.flat_keys.clear(),
        "more anchors than items": lambda r: r.tokenized.input_ids.append(IMAGE_PAD),
        "one hash too many": lambda r: r.mm_inputs.mm_hashes.append("more"),
        "no hash": lambda r: r.mm_inputs.ClearField("mm_hashes"),
        "no pixels": lambda r: r.mm_inputs.ClearField("pixel_values"),
        "no item": lambda r: r.mm_inputs.ClearField("mm_placeholders"),
        "shared memory of somebody else": remote,
        "truncated payload": lambda r: setattr(
            r.mm_inputs.pixel_values, "inline", r.mm_inputs.pixel_values.inline[:-1]
        ),
        "the same batch again": lambda r: r.extra_mm_inputs.append(r.mm_inputs),
        "empty": lambda r: r.mm_inputs.Clear(),
    }


@pytest.mark.parametrize("style", ["python", "rust"])
async def test_a_request_that_would_kill_an_engine_reaches_none(style: Any) -> None:
    async with serving(SimOptions(style=style)) as served:
        for name, change in killers().items():
            request = with_tensors(f"{PICTURE}Look.", "palette_203x151.png")
            change(request)
            if not request.HasField("mm_inputs"):
                request.mm_inputs.SetInParent()
            refused = await served.refusal(request)
            assert (refused.reason, name) == ("MALFORMED_TENSORS", name)
            assert refused.about["check"], name
            assert not LEAKS.search(refused.message), name
        sim = served.workers[0]
        assert sim.stats.calls["Generate"] == 0
        assert sim.engine.dead is None
        await served.at_rest()
        assert served.outcomes() == {("client_fault", "malformed_tensors"): len(killers())}


async def test_tensors_that_are_right_get_through_and_as_references_would() -> None:
    async with serving(SimOptions()) as served:
        by_tensors = await served.say(with_tensors(f"{PICTURE}Look.", "palette_203x151.png"))
        by_reference = await served.say(seeing(f"{PICTURE}Look.", data_url("palette_203x151.png")))
        assert by_tensors == by_reference


async def test_a_client_cannot_choose_the_key_of_the_workers_caches() -> None:
    async with serving(SimOptions()) as served:
        said = [
            await served.say(with_tensors(PICTURE, name, hashes=["deadbeef"]))
            for name in ("palette_203x151.png", "solid_61x43.bmp")
        ]
        assert said[0] != said[1]
        hashes = [r.request.mm_inputs.mm_hashes[0] for r in served.workers[0].stats.received]
        assert len({*hashes, "deadbeef"}) == 3


async def test_tensors_with_a_text_prompt_are_refused() -> None:
    async with serving(SimOptions()) as served:
        request = with_tensors(PICTURE, "palette_203x151.png")
        request.text = PICTURE
        refused = await served.refusal(request)
        assert refused.reason == "INVALID_REQUEST"
        assert served.workers[0].stats.calls["Generate"] == 0


async def test_fewer_items_than_anchors_reach_no_engine() -> None:
    async with serving(SimOptions()) as served:
        refused = await served.refusal(seeing(PICTURE, SMALL, SMALL))
        assert refused.reason == "ANCHOR_MISMATCH"
        assert encode(PICTURE).count(IMAGE_PAD) == 1
        assert served.workers[0].stats.calls["Generate"] == 0
