"""A small HTTP endpoint to look at a worker in another process, and to disturb it."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from google.protobuf.json_format import MessageToDict

from workers.sim.stats import Received
from workers.sim.worker import SimWorker


class Control:
    """GET /stats, GET /requests; POST /fault, /health, /capability, /events, /engine."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._runner: web.AppRunner | None = None

    async def start(self, listen: str) -> str:
        """Opens the endpoint; returns its address. OSError when it cannot be opened."""
        host, _, port = listen.rpartition(":")
        app = web.Application()
        app.add_routes(
            [
                web.get("/stats", self._stats),
                web.get("/requests", self._requests),
                web.post("/fault", self._fault),
                web.post("/health", self._health),
                web.post("/capability", self._capability),
                web.post("/events", self._events),
                web.post("/engine", self._engine),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, int(port)).start()
        bound: int = self._runner.addresses[0][1]
        return f"{host}:{bound}"

    async def stop(self) -> None:
        """Closes the endpoint, if it was opened."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _stats(self, _: web.Request) -> web.Response:
        return web.json_response(snapshot(self._worker))

    async def _requests(self, _: web.Request) -> web.Response:
        return web.json_response([_request(entry) for entry in self._worker.stats.received])

    async def _fault(self, request: web.Request) -> web.Response:
        """`{"rule": "2*fail=UNAVAILABLE"}`, or `{"clear": true}` first or alone."""
        body = await _object(request, {"rule": str, "clear": bool})
        if body.get("clear"):
            self._worker.troubles.clear()
        if "rule" in body:
            try:
                self._worker.troubles.add(body["rule"])
            except ValueError as error:
                raise _bad(str(error)) from error
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.Response:
        """`{"serving": false}`."""
        body = await _object(request, {"serving": bool})
        if "serving" not in body:
            raise _bad("serving is missing")
        await self._worker.set_serving(body["serving"])
        return web.json_response({})

    async def _capability(self, request: web.Request) -> web.Response:
        """Options by name, as `{"mm_processor": "", "mm_schemes": ["data"]}`."""
        body = await _object(request, None)
        try:
            self._worker.change(**{name: _option(name, value) for name, value in body.items()})
        except (ValueError, TypeError) as error:
            raise _bad(str(error)) from error
        return web.json_response({})

    async def _events(self, request: web.Request) -> web.Response:
        """`{"skip": 3}` leaves a hole in the numbers; `{"cut": true}` ends the subscriptions."""
        body = await _object(request, {"skip": int, "cut": bool})
        self._worker.events.skip(body.get("skip", 0))
        if body.get("cut"):
            self._worker.events.cut()
        return web.json_response({})

    async def _engine(self, request: web.Request) -> web.Response:
        """`{"dead": true}` ends the engine; false starts a new one, its caches empty."""
        body = await _object(request, {"dead": bool})
        if body.get("dead"):
            self._worker.engine.die("as was asked for")
        else:
            self._worker.revive()
        return web.json_response({})


def snapshot(worker: SimWorker) -> dict[str, Any]:
    """Everything countable about the worker, as JSON has it."""
    stats, encoder, cache = worker.stats, worker.encoder, worker.cache
    return {
        "address": worker.address,
        "calls": dict(stats.calls),
        "live": stats.live,
        "finished": stats.finished,
        "aborted": stats.aborted,
        "cancelled": stats.cancelled,
        "refused": dict(stats.refused),
        "with_extensions": stats.with_extensions,
        "tokens": stats.tokens,
        "running": worker.scheduler.running,
        "waiting": worker.scheduler.waiting,
        "dead": worker.engine.dead,
        "serving": worker.servicer.serving,
        "encoder_cache": {"hits": encoder.hits, "misses": encoder.misses},
        "kv_blocks": {"used": cache.used, "held": cache.held, "capacity": cache.capacity},
        "event_sequence": worker.events.sequence,
        "event_readers": worker.events.readers,
        "transfers": {"held": worker.bootstrap.held, "fetched": worker.bootstrap.fetched},
    }


def _request(entry: Received) -> dict[str, Any]:
    return {
        "at": entry.at,
        "wire_bytes": entry.wire_bytes,
        "metadata": [list(pair) for pair in entry.metadata],
        "extensions": list(entry.extensions),
        "request": MessageToDict(entry.request, preserving_proto_field_name=True),
    }


async def _object(request: web.Request, kinds: dict[str, type] | None) -> dict[str, Any]:
    """The body as a JSON object; with `kinds`, only these keys with values of these types."""
    try:
        body = await request.json()
    except ValueError as error:
        raise _bad("the body is not JSON") from error
    if not isinstance(body, dict):
        raise _bad("the body is not a JSON object")
    for name, value in body.items():
        if kinds is not None and type(value) is not kinds.get(name):
            raise _bad(f"not understood: {name}")
    return body


def _option(name: str, value: Any) -> Any:
    """JSON has lists and objects where options have tuples."""
    if name == "item_limits" and isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def _bad(message: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text=message)
