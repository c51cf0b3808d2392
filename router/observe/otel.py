"""Traces with OpenTelemetry, sent by OTLP over gRPC.

Attributes are those of the RPC and GenAI semantic conventions. Whether a trace
is kept is for the client's own context to say, or for OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.observe.tracing import Metadata, Span, Tracing, Value

_CONTEXT = TraceContextTextMapPropagator()


class OtelSpan(Span):
    """A span of the SDK."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)

    def tell(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def fail(self, kind: str, message: str = "") -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, message))

    def child(self, name: str, began: float, ended: float) -> None:
        to_wall = time.time_ns() - time.monotonic_ns()
        start, end = (int(moment * 1e9) + to_wall for moment in (began, ended))
        context = trace.set_span_in_context(self._span)
        self._tracer.start_span(name, context, start_time=start).end(end)

    def headers(self) -> tuple[tuple[str, str], ...]:
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, trace.set_span_in_context(self._span))
        return tuple(carrier.items())


class OtelTracing(Tracing):
    """`processor` takes finished spans; see `exporting`."""

    on = True

    def __init__(self, processor: SpanProcessor) -> None:
        resource = Resource.create({"service.name": "mmrouter", "service.version": _version()})
        # One of our own: nothing here is global, so that routers in one process stay apart.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("mmrouter", _version())

    @contextmanager
    def _open(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, Value] | None = None,
        context: Context | None = None,
    ) -> Iterator[OtelSpan]:
        # An exception's text is not ours, and may hold what no trace may show.
        with self._tracer.start_as_current_span(
            name,
            context,
            kind,
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield OtelSpan(self._tracer, span)

    def server(
        self, method: str, metadata: Callable[[], Metadata | None]
    ) -> AbstractContextManager[OtelSpan]:
        carrier = {
            key: value
            for key, value in metadata() or ()
            if isinstance(value, str) and key in _CONTEXT.fields
        }
        # The client's context alone: what is current here belongs to nobody.
        context = _CONTEXT.extract(carrier, Context())
        return self._open(method, SpanKind.SERVER, _rpc(method), context)

    def client(self, method: str, address: str) -> AbstractContextManager[OtelSpan]:
        host, _, port = address.rpartition(":")
        where: dict[str, Value] = {"server.address": host.strip("[]"), "server.port": int(port)}
        return self._open(method, SpanKind.CLIENT, {**_rpc(method), **where})

    def step(self, name: str) -> AbstractContextManager[OtelSpan]:
        return self._open(name, SpanKind.INTERNAL)

    def close(self) -> None:
        self._provider.shutdown()


def exporting(endpoint: str) -> OtelTracing:
    """Traces that go to a collector at `http(s)://HOST:PORT`; without a scheme, in clear."""
    insecure = not endpoint.startswith("https://")
    return OtelTracing(BatchSpanProcessor(OTLPSpanExporter(endpoint, insecure=insecure)))


def _rpc(method: str) -> dict[str, Value]:
    return {"rpc.system.name": "grpc", "rpc.method": method}


def _version() -> str:
    return version("mmrouter")
