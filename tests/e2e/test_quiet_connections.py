"""Connections on which nothing is said for a while stay, whoever pings."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from router import config
from tests.serving import serving, streamed
from workers.sim import SimOptions

# gRPC clients ping no more often than this, whatever they are told.
_FASTEST_PING = 10.0


@pytest.mark.slow
async def test_a_client_that_pings_every_ten_seconds_keeps_its_quiet_stream() -> None:
    pinging = [
        ("grpc.keepalive_time_ms", int(_FASTEST_PING * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with serving(SimOptions()) as served:
        async with grpc.aio.insecure_channel(served.app.listen, pinging) as channel:
            generate = channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
            call = generate(streamed("[[sim: hang-after-chunks=1]]").SerializeToString())
            await call.read()
            # Three pings end a connection to a server that keeps gRPC's own rules.
            await asyncio.sleep(4.5 * _FASTEST_PING)
            assert not call.done()
            assert channel.get_state() is grpc.ChannelConnectivity.READY
            call.cancel()
        await served.at_rest()


def test_workers_are_not_pinged_more_often_than_servers_allow() -> None:
    assert config.load({}).keepalive_worker_interval > 300
    with pytest.raises(config.ConfigError, match="keepalive_worker_interval"):
        config.load({"keepalive_worker_interval": "60s"})
