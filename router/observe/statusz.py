"""The status page: what somebody on call wants to see first. One file, no scripts, no assets.

Every state is a word; colour only repeats it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from router.observe.plot import sparkline
from router.observe.recent import Failure
from router.observe.style import STYLE

REFRESH = 5
_TROUBLE = {"unhealthy": 0, "pending": 1, "draining": 2, "ready": 3}


@dataclass(frozen=True)
class WorkerRow:
    """One worker; times in seconds, `kv_usage` a share. None where nobody said."""

    address: str
    state: str
    reason: str
    since: float
    model: str
    role: str
    media: str
    in_flight: int
    running: int | None
    waiting: int | None
    kv_usage: float | None
    load_age: float | None
    breaker: str


@dataclass(frozen=True)
class ModeRow:
    """Where a model's media become tensors. `now` is the mode and reason of the last request."""

    model: str
    media: str
    now: str
    reason: str
    counts: str


@dataclass(frozen=True)
class Status:
    """All that the page shows, as of `now` (monotonic seconds)."""

    now: float
    not_ready: str | None
    facts: Sequence[tuple[str, str]] = ()
    workers: Sequence[WorkerRow] = ()
    modes: Sequence[ModeRow] = ()
    failures: Sequence[Failure] = ()
    caches: Sequence[tuple[str, str]] = ()
    series: Sequence[tuple[str, Sequence[float]]] = ()
    series_length: int = field(default=120)
    series_seconds: float = 600.0


def page(status: Status) -> str:
    """The page's HTML; it refreshes itself."""
    ready = "ready" if status.not_ready is None else "not ready"
    word = ready.replace(" ", "-")
    why = f" <span>{escape(status.not_ready)}</span>" if status.not_ready else ""
    plots = "".join(
        sparkline(title, values, status.series_length) for title, values in status.series
    )
    minutes = f"{status.series_seconds / 60:.0f} minutes"
    parts = (
        f'<header><h1>mmrouter</h1><p class="state {word}"><b>{ready}</b>{why}</p>'
        f"{_list(status.facts)}</header>",
        f'<section class="plots" aria-label="last {minutes}">{plots}</section>'
        f'<p class="note">Plots: the last {minutes}.</p>'
        if plots
        else "",
        _section(
            "Workers",
            _summary(status.workers)
            + _table(
                ("worker", "state", "model", "media", "load", "breaker"),
                (_worker(row) for row in sorted(status.workers, key=_trouble)),
                "No worker is registered.",
            ),
        ),
        _section(
            "Where media become tensors",
            _table(
                ("model", "media", "last", "because", "requests so far"),
                (
                    _cells(row.model, row.media, row.now, row.reason, row.counts)
                    for row in status.modes
                ),
                "No request with media has come yet.",
            ),
        ),
        _section(
            "Last errors",
            _table(
                ("error", "count", "last", "model", "what the client was told"),
                (_failure(failure, status.now) for failure in status.failures),
                "No request has failed.",
            ),
        ),
        _section("Caches and memory for media", _list(status.caches)),
        '<nav><a href="/metrics">metrics</a> <a href="/readyz">readyz</a> '
        '<a href="/livez">livez</a></nav>',
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>mmrouter: {ready}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="refresh" content="{REFRESH}"><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def ago(seconds: float) -> str:
    """Seconds in one unit, as in `12s`, `3m`, `2h`, `5d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _list(facts: Iterable[tuple[str, str]]) -> str:
    shown = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    return f"<dl>{shown}</dl>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], none: str) -> str:
    """`rows` are of cells that are HTML already. On a phone each cell is told its column."""
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-label="{h}"><div>{cell}</div></td>'
            for h, cell in zip(header, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    if not body:
        return f'<p class="note">{escape(none)}</p>'
    head = "".join(f"<th scope=col>{h}</th>" for h in header)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(*texts: str) -> list[str]:
    return [escape(text) or "–" for text in texts]


def _summary(workers: Sequence[WorkerRow]) -> str:
    if not workers:
        return ""
    states = Counter(row.state for row in workers)
    told = ", ".join(f"{n} {state}" for state, n in states.most_common())
    unclosed = sum(row.breaker != "closed" for row in workers)
    breakers = f"; {unclosed} with a breaker that is not closed" if unclosed else ""
    return f'<p class="note">{len(workers)} in all: {escape(told + breakers)}.</p>'


def _trouble(row: WorkerRow) -> tuple[int, bool]:
    """What needs looking at comes first; the rest stays in order of registration."""
    return _TROUBLE.get(row.state, 0), row.breaker == "closed"


def _worker(row: WorkerRow) -> list[str]:
    role = "" if row.role == "both" else f"<small>{escape(row.role)}</small>"
    known = (row.running, row.waiting, row.kv_usage)
    reported = "no report"
    if any(value is not None for value in known):
        running, waiting = ("?" if n is None else str(n) for n in known[:2])
        usage = "" if row.kv_usage is None else f", KV {row.kv_usage:.0%}"
        age = "" if row.load_age is None else f", {ago(row.load_age)} ago"
        reported = f"{running} running, {waiting} waiting{usage}{age}"
    return [
        f"<b>{escape(row.address)}</b>{role}",
        f'<b class="word {escape(row.state)}">{escape(row.state)}</b> for {ago(row.since)}'
        f"<small>{escape(row.reason)}</small>",
        escape(row.model) or "–",
        escape(row.media) or "–",
        f"{row.in_flight} of ours<small>{reported}</small>",
        f'<b class="word {escape(row.breaker)}">{escape(row.breaker.replace("_", " "))}</b>',
    ]


def _failure(failure: Failure, now: float) -> list[str]:
    reason = failure.reason if failure.reason != failure.outcome else ""
    request = f"<small>request {escape(failure.request_id)}</small>" if failure.request_id else ""
    return [
        f"<b>{escape(failure.outcome)}</b><small>{escape(reason)}</small>",
        str(failure.count),
        f"{ago(now - failure.last_at)} ago",
        escape(failure.model),
        f"{escape(failure.message) or '–'}{request}",
    ]
