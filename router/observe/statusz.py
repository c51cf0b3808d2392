"""The status page: one table of workers, no external assets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 1.5rem; color: #1b1f24; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid #d8dee4; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.ready { color: #1a7f37; } .pending { color: #9a6700; } .draining { color: #9a6700; }
.unhealthy { color: #cf222e; } .gone { color: #6e7781; }
.scroll { overflow-x: auto; }
"""


@dataclass(frozen=True)
class WorkerRow:
    """One line of the table; times in seconds."""

    address: str
    state: str
    reason: str
    since: float
    model: str
    media: str
    in_flight: int
    running: int | None
    waiting: int | None
    load_age: float | None
    breaker: str


def page(title: str, facts: Iterable[tuple[str, str]], rows: Iterable[WorkerRow]) -> str:
    """The page's HTML; it refreshes itself."""
    listed = "".join(_row(row) for row in rows) or (
        '<tr><td colspan="10">no worker is registered</td></tr>'
    )
    shown = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="5"><style>{_STYLE}</style></head>
<body><h1>{escape(title)}</h1><dl>{shown}</dl>
<div class="scroll"><table><thead><tr><th>worker</th><th>state</th><th>for</th><th>reason</th>
<th>model</th><th>media</th><th>ours</th><th>running</th><th>waiting</th><th>breaker</th>
</tr></thead><tbody>{listed}</tbody></table></div>
<p><a href="/metrics">metrics</a></p></body></html>
"""


def _row(row: WorkerRow) -> str:
    age = "" if row.load_age is None else f' title="reported {row.load_age:.0f}s ago"'
    state = escape(row.state)
    return (
        f'<tr><td>{escape(row.address)}</td><td class="{state}">{state}</td>'
        f'<td class="n">{row.since:.0f}s</td><td>{escape(row.reason)}</td>'
        f"<td>{escape(row.model)}</td><td>{escape(row.media)}</td>"
        f'<td class="n">{row.in_flight}</td><td class="n"{age}>{_known(row.running)}</td>'
        f'<td class="n"{age}>{_known(row.waiting)}</td><td>{escape(row.breaker)}</td></tr>'
    )


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)
