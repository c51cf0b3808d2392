"""Log lines: structlog, as JSON or for a console.

What comes from outside must neither fill a disk nor tell a secret: values are
cut, URLs lose all but scheme and host, and a line of JSON stays below 2 KB.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

from router.observe.lines import Lines
from router.observe.snapshot import Source, one

_LEVELS = logging.getLevelNamesMapping()
_MAX_VALUE = 512
_MAX_LINE = 2000
# Of a traceback: its end says what happened and where.
_MAX_TRACEBACK = 1200
_MAX_ID = 128

# A host, after the credentials that may stand before it. Without a bound on the scheme every
# dot of a long text would begin a walk to its end.
_URL = re.compile(
    r"\b(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]{0,31})://(?:[^\s/?#'\"]*@)?(?P<host>[^\s/?#'\"]*)"
)
# Where a text ends within a URL's authority, of which it cannot be told what is a password.
_CUT_OFF = re.compile(r"://[^\s/?#'\"]*\Z")
_REST = re.compile(r"[^\s'\"]*")
_DATA_URL = re.compile(r"\bdata:[^\s'\"]*", re.IGNORECASE)


class _Threshold:
    """The least level that is logged."""

    level = logging.INFO


class _Logger(structlog.BoundLoggerBase):
    """A logger that is long made when the level changes, and costs next to nothing below it."""

    def is_enabled_for(self, level: int) -> bool:
        """Whether a line of this level of the standard library's would be told."""
        return level >= _Threshold.level

    def debug(self, event: str, **values: Any) -> Any:
        return self._log(logging.DEBUG, "debug", event, values)

    def info(self, event: str, **values: Any) -> Any:
        return self._log(logging.INFO, "info", event, values)

    def warning(self, event: str, **values: Any) -> Any:
        return self._log(logging.WARNING, "warning", event, values)

    def error(self, event: str, **values: Any) -> Any:
        return self._log(logging.ERROR, "error", event, values)

    def _log(self, level: int, name: str, event: str, values: dict[str, Any]) -> Any:
        if self.is_enabled_for(level):
            return self._proxy_to_logger(name, event, **values)
        return None


class _Output:
    """Where lines go in a process that serves."""

    lines: Lines | None = None


def configure_server(form: Literal["json", "console"], least: str) -> None:
    """As `configure`, for a process that has to serve whatever becomes of its log."""
    lines = _Output.lines = Lines()
    atexit.register(lines.drain)
    configure(form, least, lines)


def drain() -> None:
    """Waits, a second at most, until the lines of a process that serves are written."""
    if _Output.lines is not None:
        _Output.lines.drain()


def announce(address: str) -> None:
    """Prints where the process listens, for whoever started it; it serves if nobody takes that."""
    try:
        # Nothing may stay in a buffer that cannot be written when the process ends.
        os.write(1, f"listening on {address}\n".encode())
    except OSError as error:
        _log.warning("not_announced", why=error.strerror)


def lost_gauge() -> Source:
    """How many lines could not be written."""
    return Source(
        "router_log_lines_lost",
        "Lines of the log that standard error did not take.",
        one(lambda: 0 if _Output.lines is None else _Output.lines.lost),
        counter=True,
    )


def configure(
    form: Literal["json", "console"], least: str, output: TextIO | Lines | None = None
) -> None:
    """Sets up structlog and the standard library's loggers alike, on `output` or stderr."""
    stream: Any = output or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        # Without local variables: those hold prompts, pictures and signed URLs.
        structlog.processors.format_exc_info,
        discreet,
    ]
    if form == "json":
        last: Processor = short_json
    else:
        last = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(
        processors=[*shared, last],
        wrapper_class=_Logger,
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    set_level(least)


def level() -> str:
    """The least level that is logged: debug, info, warning or error."""
    return logging.getLevelName(_Threshold.level).lower()


def set_level(name: str) -> None:
    """Logs from this level on, at once and everywhere. Raises KeyError for an unknown name."""
    _Threshold.level = _LEVELS[name.upper()]
    logging.getLogger().setLevel(max(_Threshold.level, logging.WARNING))


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry `room=name`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(room=name)
    return logger


def bind_request(request_id: str) -> None:
    """Every further line of this task, and of those that it starts, carries the request's id."""
    structlog.contextvars.bind_contextvars(request=request_id[:_MAX_ID])


def bind_process(number: int) -> None:
    """Every further line of this process carries its number among its siblings."""
    structlog.contextvars.bind_contextvars(process=number)


def bind_trace(trace_id: str) -> None:
    """Every further line of this task, and of those that it starts, carries the trace's id."""
    structlog.contextvars.bind_contextvars(trace=trace_id)


# -- What may be told


def discreet(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Cuts long values and strips URLs, in place."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = _told(value, tail=key == "exception")
        elif not isinstance(value, int | float | None) and key not in ("exc_info", "timestamp"):
            event[key] = _told_of(value)
    return event


def _told_of(value: object) -> object:
    match value:
        case Mapping():
            return {str(k)[:_MAX_ID]: _told_of(v) for k, v in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_told_of(v) for v in value]
        case bool() | int() | float() | None:
            return value
    return _told(str(value))


def _told(text: str, *, tail: bool = False) -> str:
    if tail:
        # The beginning of a URL must not be cut off before it is known for one.
        return _cut(without_secrets(text), _MAX_TRACEBACK, tail=True)
    if len(text) <= _MAX_VALUE:
        return without_secrets(text)
    # Of a long text only what is told is looked through.
    kept = without_secrets(_CUT_OFF.sub("://", text[:_MAX_VALUE]))
    return f"{kept}… ({len(text)} characters)"


def _cut(text: str, limit: int, *, tail: bool = False) -> str:
    if len(text) <= limit:
        return text
    kept = f"…{text[-limit:]}" if tail else f"{text[:limit]}…"
    return f"{kept} ({len(text)} characters)"


def without_secrets(text: str) -> str:
    """The text with each URL reduced to scheme and host, and each data: URL to its scheme."""
    if "://" in text:
        text = _strip_urls(text)
    if "data:" in text.lower():
        text = _DATA_URL.sub("data:…", text)
    return text


def _strip_urls(text: str) -> str:
    parts, end = [], 0
    for match in _URL.finditer(text):
        if match.start() < end:
            continue
        parts.append(text[end : match.start()])
        rest = _REST.match(text, match.end())
        end = rest.end() if rest else match.end()
        more = "/…" if end > match.end() else ""
        parts.append(f"{match['scheme']}://{match['host']}{more}")
    parts.append(text[end:])
    return "".join(parts)


def short_json(_logger: object, _method: str, event: EventDict) -> str:
    """A line of JSON of at most 2000 bytes: longer ones lose the ends of their values."""
    line = _json(event)
    limit = _MAX_VALUE
    while len(line) > _MAX_LINE // 4 and _nbytes(line) > _MAX_LINE and limit > 8:
        limit //= 2
        event = {k: _shortened(v, limit, tail=k == "exception") for k, v in event.items()}
        line = _json(event)
    return line


def _shortened(value: Any, limit: int, *, tail: bool) -> Any:
    if isinstance(value, dict | list):
        value = _json(value)
    # What is most likely needed may be longer than the rest.
    return _cut(value, limit * (2 if tail else 1), tail=tail) if isinstance(value, str) else value


def _nbytes(line: str) -> int:
    return len(line.encode(errors="backslashreplace"))


_log = get_logger("app")

# Made once: `json.dumps` makes one for each line.
_json = json.JSONEncoder(ensure_ascii=False, default=str).encode
