"""What a worker is told of a request's time."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.attempt import whole_timeout


@pytest.mark.parametrize("left", [0.5, 2.998, 9.991, 33.31, 599.1, 3590.0, 12345.6])
async def test_a_server_never_sees_more_time_than_there_is(left: float) -> None:
    seen: list[float] = []

    async def answer(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        remaining = context.time_remaining()
        assert remaining is not None
        seen.append(remaining)
        return b""

    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.unary_unary("/s/m")(b"", timeout=whole_timeout(left))
    finally:
        await server.stop(0)
    assert seen[0] <= left


@given(st.floats(0.01, 1e5))
def test_little_of_it_is_lost(left: float) -> None:
    timeout = whole_timeout(left)
    assert left * 0.989 - 0.006 <= timeout < left


@pytest.mark.parametrize("left", [0.0, -1.0, 0.0005])
def test_there_is_always_a_little_left(left: float) -> None:
    assert whole_timeout(left) == 0.001
