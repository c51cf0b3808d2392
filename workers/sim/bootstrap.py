"""Where a simulated Mooncake prefill worker hands over what it has computed.

A decode worker asks for a transfer by its id, as soon as it likes: the answer
comes when the prefill is done. A transfer is held until somebody has fetched
it, or until the prefill's request is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import grpc
from aiohttp import web

from workers.sim.handoff import Incoming, Remote, pack, unpack
from workers.sim.prompt import Prompt
from workers.sim.refused import Refused


class Bootstrap:
    """GET /transfers/ID?engine=ENGINE. `engine_id` is the worker's own name among engines."""

    def __init__(self, engine_id: Callable[[], str]) -> None:
        self._engine_id = engine_id
        self._held: dict[str, tuple[str, dict[str, Any]]] = {}
        self._posted = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        # How many transfers decode workers have fetched.
        self.fetched = 0

    @property
    def held(self) -> int:
        """Transfers that wait for somebody to fetch them."""
        return len(self._held)

    async def start(self, listen: str) -> str:
        """Opens the endpoint; returns its HOST:PORT. OSError when it cannot be opened."""
        host, _, port = listen.rpartition(":")
        app = web.Application()
        app.add_routes([web.get("/transfers/{id}", self._transfer)])
        # Whoever waits here keeps no worker from stopping, and takes nothing once it has left.
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, int(port)).start()
        return f"{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Closes the endpoint, if it was opened."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def post(self, transfer_id: str, request_id: str, prompt: Prompt) -> None:
        """Offers what `request_id` has computed under a transfer's id."""
        async with self._posted:
            self._held[transfer_id] = request_id, pack(prompt)
            self._posted.notify_all()

    def drop(self, request_id: str) -> None:
        """Forgets what an aborted request has offered."""
        for transfer_id in [t for t, (owner, _) in self._held.items() if owner == request_id]:
            del self._held[transfer_id]

    async def _transfer(self, request: web.Request) -> web.Response:
        transfer_id = request.match_info["id"]
        if request.query.get("engine") != self._engine_id():
            raise web.HTTPNotFound(text="this is another engine")
        async with self._posted:
            await self._posted.wait_for(lambda: transfer_id in self._held)
            _, transfer = self._held.pop(transfer_id)
        self.fetched += 1
        return web.json_response(transfer)


async def fetch(remote: Remote, timeout: float) -> Incoming:
    """Waits for a transfer and brings it here; INTERNAL when it cannot be had."""
    limits = aiohttp.ClientTimeout(total=timeout)
    url = f"{remote.bootstrap}/transfers/{remote.transfer_id}"
    try:
        async with (
            aiohttp.ClientSession(timeout=limits) as session,
            session.get(url, params={"engine": remote.engine_id}) as answer,
        ):
            answer.raise_for_status()
            return unpack(await answer.json())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Refused(
            grpc.StatusCode.INTERNAL, "the transfer cannot be had from the prefill worker"
        ) from error
