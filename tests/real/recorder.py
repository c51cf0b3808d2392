"""A gRPC proxy that writes down what a client asked and what a worker answered.

Put between two of client, router and worker, it shows what went over that hop,
field by field: `diff` of two recorded requests names each field in which two
ways of asking the same differ. Bytes pass through untouched.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc_health.v1 import health_pb2

from router.wire import common, engine

# Longer bytes are told apart by their hash, and text and lists are cut when printed.
LITERAL_BYTES = 64
PRINTED = 160

Json = Any

_METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (engine, common, health_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
_END_TO_END = ("grpc-status-details-bin", "grpc-retry-pushback-ms")
_HOP_BY_HOP = ("grpc-", "user-agent", "te", "content-type", ":")


@dataclass
class Call:
    """One call as it passed. `status` is None until it has ended."""

    method: str
    metadata: dict[str, str]
    request: Json
    raw_request: bytes = field(repr=False)
    responses: list[Json] = field(default_factory=list)
    status: grpc.StatusCode | None = None
    details: str = ""
    trailers: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.method.rpartition("/")[2]


class Recorder:
    """Listens on a loopback port, passes every call on to `upstream`, keeps `calls` in order.

    async with Recorder("127.0.0.1:50151") as recorder:
        ...  # talk to recorder.address
        recorder.of("Generate")[-1].request
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.address = ""
        self.calls: list[Call] = []

    def of(self, name: str) -> list[Call]:
        """The calls of one method, by its bare name."""
        return [call for call in self.calls if call.name == name]

    async def __aenter__(self) -> Recorder:
        limits = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_http_proxy", 0),
        ]
        self._channel = grpc.aio.insecure_channel(self.upstream, limits)
        self._server = grpc.aio.server(options=limits)
        self._server.add_generic_rpc_handlers((_Every(self._pass_on),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)
        await self._channel.close()

    async def _pass_on(
        self,
        method: str,
        request: bytes,
        context: grpc.aio.ServicerContext[bytes, bytes],
    ) -> AsyncIterator[bytes]:
        metadata = _own(context.invocation_metadata())
        kind = _METHODS.get(method)
        call = Call(
            method,
            {key: _text(value) for key, value in metadata},
            _parsed(request, kind and kind.input_type),
            request,
        )
        self.calls.append(call)
        open_call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
        open_call = self._channel.unary_stream(method)
        upstream = open_call(request, timeout=context.time_remaining(), metadata=metadata)
        try:
            async for response in upstream:
                call.responses.append(_parsed(response, kind and kind.output_type))
                yield response
        except grpc.aio.AioRpcError:
            pass  # told below, as every other end is
        finally:
            if not upstream.done():
                upstream.cancel()
                call.status = grpc.StatusCode.CANCELLED
        trailers = _own(await upstream.trailing_metadata())
        call.trailers = {key: _text(value) for key, value in trailers}
        call.status, call.details = await upstream.code(), await upstream.details() or ""
        context.set_trailing_metadata(trailers)
        context.set_code(call.status)
        context.set_details(call.details)


@contextmanager
def recording(upstream: str) -> Iterator[Recorder]:
    """A recorder on a thread of its own, for tests that share one."""
    recorder = Recorder(upstream)
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(step: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(step, loop).result()

    try:
        run(recorder.__aenter__())
        yield recorder
        run(recorder.__aexit__())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Every(grpc.GenericRpcHandler):
    """Serves any method of one request: on the wire a unary answer is a stream of one message."""

    def __init__(self, serve: Any) -> None:
        self._serve = serve

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        # A generator itself: grpc.aio takes anything else for a blocking handler.
        async def handle(request: bytes, context: Any) -> Any:
            async for response in self._serve(call.method, request, context):
                yield response

        return grpc.unary_stream_rpc_method_handler(handle)


def describe(message: Message) -> Json:
    """The fields that are set, as dicts, lists and scalars; defaults are left out.

    A tensor is {shape, dtype, bytes, sha256}, long bytes are {bytes, sha256},
    an enum is its name, and fields that the descriptor does not know are listed
    by number under "unknown".
    """
    if isinstance(message, engine.TensorData):
        return _describe_tensor(message)
    described = {name.name: _describe_field(name, value) for name, value in message.ListFields()}
    unknown: Any = UnknownFieldSet(message)
    if len(unknown):
        described["unknown"] = sorted({part.field_number for part in unknown})
    return described


def diff(a: Json, b: Json, path: str = "") -> list[str]:
    """A line for each place where two descriptions differ: `path: a != b`."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            line
            for key in dict.fromkeys([*a, *b])
            for line in diff(a.get(key, ABSENT), b.get(key, ABSENT), f"{path}.{key}".lstrip("."))
        ]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        lines = [
            line
            for index, pair in enumerate(zip(a, b, strict=True))
            for line in diff(*pair, f"{path}[{index}]")
        ]
        # Many places of one list say less than the two lists do.
        return lines if len(lines) <= 3 else [_line(path, a, b)]
    return [] if type(a) is type(b) and a == b else [_line(path, a, b)]


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def _line(path: str, a: Json, b: Json) -> str:
    return f"{path or 'whole'}: {_short(a)} != {_short(b)}"


def _short(value: Json) -> str:
    text = repr(value)
    size = f" ({len(value)} long)" if isinstance(value, list | str) else ""
    return text if len(text) <= PRINTED else f"{text[:PRINTED]}…{size}"


def _describe_field(kind: FieldDescriptor, value: Any) -> Json:
    if kind.message_type is not None and kind.message_type.GetOptions().map_entry:
        of = kind.message_type.fields_by_name["value"]
        return {str(key): _describe_value(of, value[key]) for key in sorted(value)}
    if kind.is_repeated:
        return [_describe_value(kind, item) for item in value]
    return _describe_value(kind, value)


def _describe_value(kind: FieldDescriptor, value: Any) -> Json:
    if kind.message_type is not None:
        return describe(value)
    if kind.enum_type is not None:
        known = kind.enum_type.values_by_number.get(value)
        return known.name if known else value
    if isinstance(value, bytes):
        return _describe_bytes(value)
    return value


def _describe_bytes(value: bytes) -> Json:
    if len(value) <= LITERAL_BYTES:
        return value.hex()
    return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}


def _describe_tensor(tensor: Any) -> Json:
    payload = tensor.WhichOneof("payload")
    described: dict[str, Json] = {"shape": list(tensor.shape), "dtype": tensor.dtype}
    if payload == "inline":
        content = hashlib.sha256(tensor.inline).hexdigest()
        described |= {"bytes": len(tensor.inline), "sha256": content}
    elif payload is not None:
        described[payload] = describe(getattr(tensor, payload))
    return described


def _parsed(raw: bytes, kind: Any) -> Json:
    if kind is None:
        return _describe_bytes(raw)
    return describe(GetMessageClass(kind).FromString(raw))


def _own(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    """What the two ends said to each other, without what gRPC itself adds on each hop."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if not key.startswith(_HOP_BY_HOP) or key in _END_TO_END
    )


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.hex()
