"""The HTTP face of all processes: one readiness, one set of metrics, a page that leads to each."""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape

from aiohttp import web

from router.observe.http import PAGE_HEADERS, HttpListener
from router.observe.statusz import REFRESH, ago
from router.observe.style import STYLE
from router.supervise.child import Child
from router.supervise.processes import Processes

_PAGE = 2.0


class Face(HttpListener):
    """Serves /metrics, /livez, /readyz and /statusz for all processes."""

    def __init__(self, processes: Processes) -> None:
        super().__init__()
        self._processes = processes

    def routes(self) -> list[web.RouteDef]:
        """See `HttpListener.routes`."""
        return [
            web.get("/metrics", self._serve_metrics),
            web.get("/livez", self._serve_livez),
            web.get("/readyz", self._serve_readyz),
            web.get("/statusz", self._serve_statusz),
            web.get("/statusz/{number:[0-9]+}", self._serve_statusz_of),
            web.get("/", self._serve_statusz),
        ]

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        body, content_type = await self._processes.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _serve_livez(self, _: web.Request) -> web.Response:
        return _verdict(await self._processes.why_not_live())

    async def _serve_readyz(self, _: web.Request) -> web.Response:
        return _verdict(await self._processes.why_not_ready())

    async def _serve_statusz(self, _: web.Request) -> web.Response:
        why_not = await self._processes.why_not_ready()
        return _html(_page(why_not, self._processes.living))

    async def _serve_statusz_of(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        for child in self._processes.living:
            if child.number == number:
                answer = await child.ask("/statusz", _PAGE)
                if answer is not None:
                    return _html(answer[1])
        return web.Response(status=404, text=f"process {number} does not answer\n")


def _verdict(why_not: str | None) -> web.Response:
    if why_not is None:
        return web.Response(text="ok\n")
    return web.Response(status=503, text=f"{why_not}\n")


def _html(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/html", headers=PAGE_HEADERS)


def _page(why_not: str | None, living: Iterable[Child]) -> str:
    state = "ready" if why_not is None else "not ready"
    rows = "".join(_row(child) for child in living)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{REFRESH}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>mmrouter: {state}</title><style>{STYLE}</style></head><body>"
        f'<header><h1>mmrouter</h1><p class="state {state.replace(" ", "-")}"><b>{state}</b>'
        f" <span>{escape(why_not or '')}</span></p></header>"
        "<main><section><h2>Processes</h2><table><thead><tr><th scope=col>Process</th>"
        "<th scope=col>State</th><th scope=col>PID</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></section></main>"
        '<nav><a href="/metrics">metrics</a><a href="/readyz">readiness</a></nav>'
        "</body></html>\n"
    )


def _row(child: Child) -> str:
    state = "takes connections" if child.listens else "starting"
    cells = (
        ("Process", f'<a href="/statusz/{child.number}">process {child.number}</a>'),
        ("State", f"{state}<small>for {ago(time.monotonic() - child.began)}</small>"),
        ("PID", str(child.pid)),
    )
    shown = "".join(f'<td data-label="{title}"><div>{cell}</div></td>' for title, cell in cells)
    return f"<tr>{shown}</tr>"
