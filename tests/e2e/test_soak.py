"""Requests that are gone leave nothing behind: no memory, task, file or shared segment."""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.request.shm import ROOT, namespace_id
from tests.media.server import Server, fixed, running
from tests.serving import PICTURE, Serving, eventually, image, seeing, serving, streamed
from workers.sim import SimOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Act = Callable[[Serving, int], Awaitable[None]]

AT_ONCE = 8
ALLOWED_GROWTH = 30 << 20


def distinct(number: int) -> str:
    """A picture that no cache has: its JPEG comment is new."""
    raw, comment = image("photo_333x517_422.jpg"), str(number).encode()
    marker = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
    return "data:image/jpeg;base64," + base64.b64encode(raw[:2] + marker + raw[2:]).decode()


async def leave(served: Serving, _: int) -> None:
    call = served.stub.Generate(streamed("[[sim: hang-after-chunks=1]]"), timeout=60)
    await call.read()
    call.cancel()


async def look(served: Serving, number: int) -> None:
    request = seeing(PICTURE, distinct(number), max_tokens=2)
    async for _ in served.stub.Generate(request, timeout=60):
        pass


def miss(host: Server) -> Act:
    host.routes["/missing.jpg"] = fixed(status="404 Not Found")

    async def act(served: Serving, number: int) -> None:
        request = seeing(PICTURE, host.url(f"/missing.jpg?{number}"), max_tokens=2)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in served.stub.Generate(request, timeout=60):
                pass
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    return act


async def test_a_thousand_requests_leave_nothing() -> None:
    worker = SimOptions(mm_processor="", shm_namespace_id=namespace_id(), record_requests=0)
    settings: dict[str, Any] = {
        "mm_processing": "router",
        "media_allow_private_hosts": True,
        "media_cache_bytes": "4MiB",
        "shm_min_bytes": "1KiB",
        "log_level": "error",
    }
    numbers = iter(range(1 << 30))
    async with running() as host, serving(worker, **settings) as served:
        acts: tuple[tuple[Act, int], ...] = ((leave, 1000), (look, 300), (miss(host), 200))

        async def one(act: Act, left: Iterator[int]) -> None:
            for _ in left:
                await act(served, next(numbers))

        async def all_acts(share: float) -> None:
            for act, times in acts:
                left = iter(range(int(times * share)))
                await asyncio.gather(*(one(act, left) for _ in range(AT_ONCE)))
            await served.at_rest()

        await all_acts(0.2)
        memory, files, tasks = _memory(), _files(), len(asyncio.all_tasks())
        await all_acts(1.0)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks, "no task is left")
        await eventually(lambda: _files() <= files, "no file is left")
        assert not [path for path in ROOT.glob("mmrouter-*") if path.suffix != ".lock"]
        assert served.worker().load.in_flight == 0
        assert _memory() - memory < ALLOWED_GROWTH


def _memory() -> int:
    gc.collect()
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))
