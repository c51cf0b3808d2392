"""Connections to workers go straight to them."""

from __future__ import annotations

import pytest

from tests.media.server import running
from tests.serving import serving
from workers.sim import SimOptions


async def test_a_proxy_of_the_environment_is_not_asked_for_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as proxy:
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, proxy.url("/"))
        for name in ("no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        # Its metadata are read and its health is asked for, all over such a connection.
        async with serving(SimOptions()) as served:
            await served.ready()
            assert served.workers[0].stats.calls["GetModelInfo"] == 1
        assert proxy.connections == 0
