import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from router.observe.otel import OtelTracing
from tests.e2e.pairs import decoding, pairing, prefilling
from tests.serving import MODEL, PICTURE, Serving, data_url, seeing, serving, streamed, tokenized
from workers.sim import SimOptions, SimWorker

GENERATE = "vllm.grpc.engine.VllmEngine/Generate"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = [("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"), ("tracestate", "vendor=1")]


class Spans(list[ReadableSpan]):
    def named(self, name: str, kind: SpanKind = SpanKind.INTERNAL) -> list[ReadableSpan]:
        return [span for span in self if span.name == name and span.kind is kind]

    def one(self, name: str, kind: SpanKind = SpanKind.INTERNAL) -> ReadableSpan:
        (span,) = self.named(name, kind)
        return span

    @property
    def root(self) -> ReadableSpan:
        return self.one(GENERATE, SpanKind.SERVER)

    @property
    def attempts(self) -> list[ReadableSpan]:
        return self.named(GENERATE, SpanKind.CLIENT)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    monkeypatch.setattr("router.app.tracing_of", lambda _: OtelTracing(SimpleSpanProcessor(kept)))
    yield kept


async def spans_of(served: Serving, exporter: InMemorySpanExporter) -> Spans:
    await served.at_rest()
    return Spans(exporter.get_finished_spans())


def sent_to(worker: SimWorker) -> dict[str, str]:
    return dict(worker.stats.received[-1].metadata)


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def test_every_step_is_a_span_of_the_client_s_trace(exporter: InMemorySpanExporter) -> None:
    async with serving(SimOptions(), mm_processing="router") as served:
        picture = data_url("rgba_203x151.png")
        request = seeing(f"{PICTURE} what?", picture, max_tokens=3)
        request.request_id = "mine"
        await served.generate(request, PARENT)
        spans = await spans_of(served, exporter)
        sent = sent_to(served.workers[0])
        address = served.workers[0].address
    root = spans.root
    steps = [spans.one(name) for name in ("plan", "fetch", "hash", "decode", "pack", "select")]
    (attempt,) = spans.attempts
    assert {span.context.trace_id for span in spans} == {int(TRACE, 16)}
    assert root.parent is not None and root.parent.span_id == 0xB7AD6B7169203331
    for span in [*steps, attempt]:
        assert span.parent is not None and span.parent.span_id == root.context.span_id, span.name
    first = spans.one("first_output")
    assert first.parent is not None and first.parent.span_id == attempt.context.span_id
    assert attempt.start_time <= first.start_time <= first.end_time <= attempt.end_time
    # The worker's own spans belong to the attempt.
    assert sent["traceparent"] == f"00-{TRACE}-{attempt.context.span_id:016x}-01"
    assert sent["tracestate"] == "vendor=1"
    told = attributes(root)
    assert told["rpc.system.name"] == "grpc" and told["rpc.method"] == GENERATE
    assert told["rpc.response.status_code"] == "OK"
    assert told["gen_ai.request.model"] == MODEL
    assert told["gen_ai.usage.output_tokens"] == 3
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["gen_ai.response.time_to_first_chunk"] > 0  # type: ignore[operator]
    assert told["mmrouter.request_id"] == "mine"
    assert told["mmrouter.mm_processing.mode"] == "router"
    host, _, port = address.rpartition(":")
    assert attributes(attempt)["server.address"] == host
    assert attributes(attempt)["server.port"] == int(port)


async def test_each_attempt_is_a_span_of_its_own(exporter: InMemorySpanExporter) -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        await served.workers[0].stop(0)
        for _ in range(4):
            await served.generate(tokenized("hello", max_tokens=1))
        spans = await spans_of(served, exporter)
    failed = [span for span in spans.attempts if span.status.status_code is StatusCode.ERROR]
    assert len(spans.attempts) == 4 + len(failed)
    assert len(spans.named("select")) == len(spans.attempts)
    assert all(attributes(s)["error.type"] == "worker_unavailable" for s in failed)
    # What a retry mends is no error of the request.
    assert {s.status.status_code for s in spans.named(GENERATE, SpanKind.SERVER)} == {
        StatusCode.UNSET
    }


async def test_a_failed_request_says_why_and_no_secret(exporter: InMemorySpanExporter) -> None:
    link = "https://u:p@h/x.jpg?token=SECRET"
    async with serving(SimOptions(), mm_processing="router") as served:
        await served.refusal(seeing(f"{PICTURE} what?", link))
        spans = await spans_of(served, exporter)
    root = spans.root
    assert root.status.status_code is StatusCode.ERROR
    assert attributes(root)["error.type"] == "media_url_invalid"
    assert attributes(root)["rpc.response.status_code"] == "INVALID_ARGUMENT"
    everything = "".join(span.to_json() for span in spans)
    assert "SECRET" not in everything and "u:p" not in everything


async def test_both_legs_of_a_pair_carry_the_trace(
    exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    async with pairing(tmp_path, prefill=[prefilling()], decode=[decoding()]) as pair:
        await pair.served.generate(streamed("hello", max_tokens=2), PARENT)
        spans = await spans_of(pair.served, exporter)
        legs = [sent_to(worker)["traceparent"] for worker in (pair.prefill[0], pair.decode[0])]
    expected = {f"00-{TRACE}-{span.context.span_id:016x}-01" for span in spans.attempts}
    assert len(expected) == 2 and set(legs) == expected


async def test_requests_at_the_same_time_have_traces_of_their_own(
    exporter: InMemorySpanExporter,
) -> None:
    async with serving(SimOptions(time_per_output_token=0.005)) as served:
        await asyncio.gather(
            *(served.generate(streamed(f"hello {i}", max_tokens=5)) for i in range(8))
        )
        spans = await spans_of(served, exporter)
    roots = spans.named(GENERATE, SpanKind.SERVER)
    assert len({root.context.trace_id for root in roots}) == 8
    for root in roots:
        own = [span for span in spans if span.context.trace_id == root.context.trace_id]
        assert sorted(span.name for span in own) == sorted(
            ["plan", "select", "first_output", GENERATE, GENERATE]
        )


async def test_what_the_client_does_not_sample_is_not_sent(exporter: InMemorySpanExporter) -> None:
    unsampled = [("traceparent", f"00-{TRACE}-b7ad6b7169203331-00")]
    async with serving(SimOptions()) as served:
        await served.generate(tokenized("hello", max_tokens=1), unsampled)
        assert await spans_of(served, exporter) == []
        assert sent_to(served.workers[0])["traceparent"].startswith(f"00-{TRACE}-")


async def test_without_an_endpoint_nothing_is_sent() -> None:
    async with serving(SimOptions()) as served:
        await served.generate(tokenized("hello", max_tokens=1), PARENT)
        assert not served.app.tracing.on
        assert "traceparent" not in sent_to(served.workers[0])


def test_a_router_without_an_endpoint_imports_no_opentelemetry() -> None:
    program = (
        "import json, sys; from router import config; from router.app import App;"
        "App(config.load({'http': ''}));"
        "print(json.dumps([m for m in sys.modules if m.startswith('opentelemetry')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []


async def test_log_lines_carry_the_trace(
    exporter: InMemorySpanExporter, logged: io.StringIO
) -> None:
    async with serving(SimOptions()) as served:
        await served.generate(tokenized("hello", request_id="r", max_tokens=1), PARENT)
        await served.at_rest()
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    assert [line["trace"] for line in lines if line.get("request") == "r"] == [TRACE]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.service = ""

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            told = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.service = told["service.name"]
            self.names += [span.name for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_reach_a_collector_before_the_router_has_stopped() -> None:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        async with serving(SimOptions(), otlp_endpoint=f"http://127.0.0.1:{port}") as served:
            await served.generate(tokenized("hello", max_tokens=1))
    finally:
        await asyncio.to_thread(server.stop(0).wait)
    assert collector.service == "mmrouter"
    assert {"plan", "select", "first_output", GENERATE} == set(collector.names)
