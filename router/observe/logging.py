"""Log lines: structlog, as JSON or for a console."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

_MAX_VALUE = 512


def configure(form: Literal["json", "console"], level: str) -> None:
    """Sets up structlog and the standard library's loggers alike, on stderr."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        _bounded,
    ]
    if form == "json":
        last: list[structlog.typing.Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        # The default formatter prints local variables: prompts, pictures, signed URLs.
        last = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(threshold, logging.WARNING))


def _bounded(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    # A value from outside must not make a line of a megabyte.
    for key, value in event.items():
        if isinstance(value, str) and len(value) > _MAX_VALUE and key != "exception":
            event[key] = f"{value[:_MAX_VALUE]}… ({len(value)} characters)"
    return event


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry `room=name`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(room=name)
    return logger
