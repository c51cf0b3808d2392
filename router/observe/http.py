"""The HTTP face: metrics for machines, health for Kubernetes, a page for people."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from aiohttp import web
from aiohttp.http import HttpProcessingError

from router.observe.logging import get_logger
from router.observe.metrics import Metrics

_log = get_logger("http")

# The page has its own style, and nothing else to load or run.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
}


class Rendered(Protocol):
    """Metrics in the form that a scraper accepts."""

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type."""


class HttpListener:
    """Serves some paths on one address."""

    def __init__(self) -> None:
        self._runner: web.AppRunner | None = None
        # The address with its real port, once it is bound.
        self.address = ""

    def routes(self) -> list[web.RouteDef]:
        """What is served."""
        raise NotImplementedError

    async def start(self, address: str) -> None:
        """Binds HOST:PORT or unix:PATH. Raises OSError when that is not possible."""
        app = web.Application()
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, logger=_server_log())
        self.address = await _listen(self._runner, address)

    async def stop(self) -> None:
        """Closes the listener."""
        if self._runner is not None:
            await self._runner.cleanup()


class Pages(HttpListener):
    """Serves /metrics, /livez, /readyz and /statusz, of one process or of all."""

    def __init__(self, source: Rendered) -> None:
        super().__init__()
        self._source = source

    def routes(self) -> list[web.RouteDef]:
        """See `HttpListener.routes`."""
        return [
            web.get("/metrics", self._serve_metrics),
            web.get("/livez", self._serve_livez),
            web.get("/readyz", self._serve_readyz),
            web.get("/statusz", self._serve_statusz),
            web.get("/", self._serve_statusz),
        ]

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._source.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _serve_livez(self, request: web.Request) -> web.Response:
        raise NotImplementedError

    async def _serve_readyz(self, request: web.Request) -> web.Response:
        raise NotImplementedError

    async def _serve_statusz(self, request: web.Request) -> web.Response:
        raise NotImplementedError


def verdict(why_not: str | None) -> web.Response:
    """200, or 503 with the reason."""
    if why_not is None:
        return web.Response(text="ok\n")
    return web.Response(status=503, text=f"{why_not}\n")


def html(text: str) -> web.Response:
    """A page for people."""
    return web.Response(text=text, content_type="text/html", headers=_PAGE_HEADERS)


class HttpFace(Pages):
    """The pages of one process.

    `ready` gives None or the reason why the router is not ready; `status` the
    page's HTML.
    """

    def __init__(
        self, metrics: Metrics, ready: Callable[[], str | None], status: Callable[[], str]
    ) -> None:
        super().__init__(metrics)
        self._ready = ready
        self._status = status

    async def _serve_livez(self, request: web.Request) -> web.Response:
        return verdict(None)

    async def _serve_readyz(self, request: web.Request) -> web.Response:
        return verdict(self._ready())

    async def _serve_statusz(self, request: web.Request) -> web.Response:
        return html(self._status())


def _server_log() -> logging.Logger:
    logger = logging.getLogger("aiohttp.server")
    logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    """Drops the tracebacks of what was no HTTP: whoever scans ports must not fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    _log.debug("http_garbage", why=type(error).__name__)
    return False


async def _listen(runner: web.AppRunner, address: str) -> str:
    """Serves on HOST:PORT or unix:PATH; the address with its real port. Raises OSError."""
    await runner.setup()
    if address.startswith("unix:"):
        await web.UnixSite(runner, address.removeprefix("unix:")).start()
        return address
    host, _, port = address.rpartition(":")
    await web.TCPSite(runner, host.strip("[]"), int(port)).start()
    return f"{host}:{runner.addresses[0][1]}"
