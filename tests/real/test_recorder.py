"""The recorder itself; needs no real worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from router.wire import common, engine
from router.wire.vllm_engine_pb2_grpc import (
    VllmEngineServicer,
    VllmEngineStub,
    add_VllmEngineServicer_to_server,
)
from tests.real.recorder import Recorder, describe, diff

FAILING = "fails"
ANSWERS = [
    engine.GenerateResponse(chunk=engine.GenerateStreamChunk(token_ids=[5, 6])),
    engine.GenerateResponse(complete=engine.GenerateComplete(finish_reason="stop")),
]


class Worker(VllmEngineServicer):
    async def Generate(self, request: engine.GenerateRequest, context: Any) -> Any:
        yield ANSWERS[0]
        if request.request_id == FAILING:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                "gone",
                (("smg-constraint-failed", "mm"), ("grpc-retry-pushback-ms", "250")),
            )
        yield ANSWERS[1]


@pytest.fixture
async def upstream() -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_VllmEngineServicer_to_server(Worker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_call_passes_and_is_written_down(upstream: str) -> None:
    async with Recorder(upstream) as recorder, grpc.aio.insecure_channel(recorder.address) as at:
        request = engine.GenerateRequest(request_id="a", stream=True)
        stream = VllmEngineStub(at).Generate(request, metadata=(("traceparent", "00-1"),))
        assert [answer async for answer in stream] == ANSWERS
    (call,) = recorder.of("Generate")
    assert call.request == {"request_id": "a", "stream": True}
    assert call.responses == [
        {"chunk": {"token_ids": [5, 6]}},
        {"complete": {"finish_reason": "stop"}},
    ]
    assert call.metadata["traceparent"] == "00-1"
    assert call.status is grpc.StatusCode.OK


async def test_an_error_passes_with_its_trailers(upstream: str) -> None:
    async with Recorder(upstream) as recorder, grpc.aio.insecure_channel(recorder.address) as at:
        stream = VllmEngineStub(at).Generate(engine.GenerateRequest(request_id=FAILING))
        assert await stream.read() == ANSWERS[0]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.UNAVAILABLE, "gone")
    assert dict(error.value.trailing_metadata() or ())["smg-constraint-failed"] == "mm"
    (call,) = recorder.calls
    assert (call.status, call.details) == (grpc.StatusCode.UNAVAILABLE, "gone")
    assert call.trailers == {"smg-constraint-failed": "mm", "grpc-retry-pushback-ms": "250"}


async def test_an_unknown_method_passes_too(upstream: str) -> None:
    async with Recorder(upstream) as recorder, grpc.aio.insecure_channel(recorder.address) as at:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = at.unary_unary("/no.Such/Method")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await method(b"abc")
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    (call,) = recorder.calls
    assert (call.method, call.request) == ("/no.Such/Method", "616263")


def _pictures(pixels: bytes, dtype: str = "uint8") -> engine.GenerateRequest:
    return engine.GenerateRequest(
        tokenized=engine.TokenizedInput(input_ids=range(1000)),
        mm_inputs=engine.MultimodalInputs(
            pixel_values=engine.TensorData(shape=[1, len(pixels)], dtype=dtype, inline=pixels),
            model_specific_tensors={
                "image_grid_thw": engine.TensorData(shape=[1, 3], dtype="int64", inline=b"g")
            },
            modality=common.IMAGE,
        ),
    )


def test_a_tensor_is_told_by_shape_dtype_and_hash() -> None:
    described = describe(_pictures(b"x" * 5000))["mm_inputs"]
    assert described["modality"] == "IMAGE"
    pixels = described["pixel_values"]
    assert (pixels["shape"], pixels["dtype"], pixels["bytes"]) == ([1, 5000], "uint8", 5000)
    assert set(described["model_specific_tensors"]) == {"image_grid_thw"}


def test_a_difference_is_named_by_its_path() -> None:
    a, b = describe(_pictures(b"x" * 80)), describe(_pictures(b"y" * 80, "float32"))
    assert diff(a, a) == []
    lines = diff(a, b)
    assert [line.partition(":")[0] for line in lines] == [
        "mm_inputs.pixel_values.dtype",
        "mm_inputs.pixel_values.sha256",
    ]
    assert "'uint8' != 'float32'" in lines[0]


def test_a_missing_field_and_a_long_list_are_differences_of_one_line() -> None:
    a, b = describe(_pictures(b"x")), describe(_pictures(b"x"))
    del b["mm_inputs"]["modality"]
    b["tokenized"]["input_ids"] = [i + 1 for i in range(1000)]
    lines = diff(a, b)
    assert len(lines) == 2
    assert lines[0].startswith("tokenized.input_ids: [0, 1, 2,")
    assert lines[1] == "mm_inputs.modality: 'IMAGE' != absent"
    assert all(len(line) < 500 for line in lines)


def test_a_field_of_a_later_contract_is_listed_by_number() -> None:
    later = b"\x82\x7d\x01z"  # field 2000, one byte long
    raw = engine.GenerateRequest(request_id="a").SerializeToString() + later
    described = describe(engine.GenerateRequest.FromString(raw))
    assert described == {"request_id": "a", "unknown": [2000]}
