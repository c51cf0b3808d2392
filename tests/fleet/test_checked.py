"""An answer that cannot be read is a call that failed, and nobody else's trouble."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from router.fleet.checked import CheckedChannel
from router.wire import ENGINE_SERVICE, common, engine, vllm_engine_pb2_grpc
from tests.serving import eventually, refusal_of, serving
from workers.sim import SimOptions

GARBAGE = b"\xff\xff"


@asynccontextmanager
async def in_front_of(address: str, *garbled: str) -> AsyncIterator[str]:
    """A worker's address that answers as the one behind it does, but to some RPCs garbage."""
    behind = grpc.aio.insecure_channel(address)

    def handler(path: str) -> Any:
        name = path.rpartition("/")[2]

        async def unary(raw: bytes, context: Any) -> bytes:
            answer: bytes = await behind.unary_unary(path)(raw)
            return GARBAGE if name in garbled else answer

        async def stream(raw: bytes, context: Any) -> AsyncIterator[bytes]:
            async for message in behind.unary_stream(path)(raw):
                yield GARBAGE if name in garbled else message

        if name in ("GetTokenizer", "Generate", "SubscribeKvEvents", "Watch"):
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            return handler(details.method)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        await behind.close()


async def test_what_is_no_message_of_its_type_raises_as_the_call_would() -> None:
    async def garbage(raw: bytes, context: Any) -> bytes:
        return GARBAGE

    async def stream(raw: bytes, context: Any) -> AsyncIterator[bytes]:
        yield common.GetTokenizerChunk(data=b"x").SerializeToString()
        yield GARBAGE

    server = grpc.aio.server()
    handlers = {
        "GetLoads": grpc.unary_unary_rpc_method_handler(garbage),
        "GetTokenizer": grpc.unary_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(ENGINE_SERVICE, handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        checked: Any = CheckedChannel(channel)
        stub = vllm_engine_pb2_grpc.VllmEngineStub(checked)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GetLoads(engine.GetLoadsRequest(), timeout=10)
        assert unary.value.code() is grpc.StatusCode.INTERNAL
        call = stub.GetTokenizer(common.GetTokenizerRequest(), timeout=10)
        coming = aiter(call)
        assert (await anext(coming)).data == b"x"
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await anext(coming)
        assert streamed.value.code() is grpc.StatusCode.INTERNAL
        call.cancel()
    await server.stop(0)


async def test_a_worker_that_garbles_spoils_nothing_for_the_others() -> None:
    async with serving(SimOptions(), SimOptions()) as served:
        behind = served.workers[0].address
        await served.app.fleet.remove(served.worker(0))
        garbled = ("GetLoads", "FlushCache", "Abort", "StartProfile")
        async with in_front_of(behind, *garbled) as address:
            served.app.fleet.add(address)
            await served.ready()
            loads = await served.stub.GetLoads(engine.GetLoadsRequest(), timeout=10)
            assert len(loads.loads) == 2
            flushed = await served.stub.FlushCache(common.FlushCacheRequest(), timeout=10)
            assert (flushed.success, flushed.message) == (False, f"{address}: INTERNAL")
            await served.app.fleet.remove(served.app.registry.get(address))


@pytest.mark.parametrize("rpc", ["GetModelInfo", "GetServerInfo", "GetTokenizer"])
async def test_metadata_that_cannot_be_read_leave_a_worker_pending_with_the_reason(
    rpc: str,
) -> None:
    async with (
        serving(SimOptions()) as served,
        in_front_of(served.workers[0].address, rpc) as address,
    ):
        served.app.fleet.add(address)
        added = served.app.registry.get(address)
        assert added is not None
        await eventually(lambda: "not a message of its type" in added.state_reason)
        assert added.state.value == "pending"
        await served.app.fleet.remove(added)


async def test_an_embedding_that_is_none_is_the_workers_failure() -> None:
    async with (
        serving(retry_max_attempts=1, ready=False) as served,
        serving(SimOptions()) as other,
        in_front_of(other.workers[0].address, "Embed") as address,
    ):
        served.app.fleet.add(address)
        await served.ready()
        request = engine.EmbedRequest(tokenized=engine.TokenizedInput(input_ids=[1]))
        refused = await refusal_of(served.stub.Embed(request, timeout=10))
        assert refused.reason == "WORKER_STREAM_BROKEN"
        assert "EmbedResponse" in refused.message
        added = served.app.registry.get(address)
        assert added is not None
        await served.app.fleet.remove(added)
