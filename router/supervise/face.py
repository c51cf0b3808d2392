"""The HTTP face of all processes: one readiness, one set of metrics, a page that leads to each."""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape

from aiohttp import web

from router.observe.http import Pages, html, verdict
from router.observe.statusz import REFRESH, ago
from router.observe.style import STYLE
from router.supervise.child import Child
from router.supervise.processes import Processes

_PAGE = 2.0


class Face(Pages):
    """The pages of all processes, and a way to those of each."""

    def __init__(self, processes: Processes) -> None:
        super().__init__(processes)
        self._processes = processes

    def routes(self) -> list[web.RouteDef]:
        """See `HttpListener.routes`."""
        return [
            *super().routes(),
            web.get("/statusz/{number:[0-9]+}", self._serve_statusz_of),
        ]

    async def _serve_livez(self, request: web.Request) -> web.Response:
        return verdict(await self._processes.why_not_live())

    async def _serve_readyz(self, request: web.Request) -> web.Response:
        return verdict(await self._processes.why_not_ready())

    async def _serve_statusz(self, request: web.Request) -> web.Response:
        why_not = await self._processes.why_not_ready()
        return html(_page(why_not, self._processes.living))

    async def _serve_statusz_of(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        for child in self._processes.living:
            if child.number == number:
                answer = await child.ask("/statusz", _PAGE)
                if answer is not None:
                    return html(answer[1])
        return web.Response(status=404, text=f"process {number} does not answer\n")


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
