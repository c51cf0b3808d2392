"""Durations and sizes as people write them: `5s`, `250ms`, `64MiB`."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# Seconds in a hundred years. gRPC counts nanoseconds in 64 bits: a deadline three hundred years
# ahead has passed.
_LONGEST = 100 * 366 * 86400.0
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_COMPOUND = re.compile(r"(?:\d+(?:\.\d+)?[a-z]+)+")


def parse_duration(text: str | float) -> float:
    """Seconds from `250ms`, `5s`, `1m30s`, `2h`; a bare number is seconds.

    Raises ValueError for anything else, negative values and more than a hundred years included.
    """
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        # A file holds values of other kinds too.
        raise ValueError(f"not a duration: {text!r}")
    if not isinstance(text, str):
        return _within_bounds(text)
    compact = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", compact):
        return _within_bounds(float(compact))
    if not _COMPOUND.fullmatch(compact):
        raise ValueError(f"not a duration: {text!r} (write 250ms, 5s, 1m30s or 2h)")
    seconds = 0.0
    for number, unit in re.findall(r"(\d+(?:\.\d+)?)([a-z]+)", compact):
        if unit not in _DURATION_UNITS:
            raise ValueError(f"not a unit of time: {unit!r} (use us, ms, s, m or h)")
        seconds += float(number) * _DURATION_UNITS[unit]
    return _within_bounds(seconds)


def parse_size(text: str | int) -> int:
    """Bytes from `64MiB`, `1GB`, `4096`.

    Raises ValueError for anything else, negative values included.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(f"not a size: {text!r} (write 4096, 64MiB or 1GB)")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in _SIZE_UNITS:
        raise ValueError(f"not a size: {text!r} (write 4096, 64MiB or 1GB)")
    return int(Decimal(match[1]) * _SIZE_UNITS[match[2].lower()])


def format_duration(seconds: float) -> str:
    """A short way to write a duration that `parse_duration` reads back as the same one."""
    exact = Decimal(repr(float(seconds)))
    if 0 < exact < 1:
        return f"{_plain(exact * 1000)}ms"
    for unit, factor in (("h", 3600), ("m", 60)):
        if exact and exact % factor == 0:
            return f"{_plain(exact / factor)}{unit}"
    return f"{_plain(exact)}s"


def format_size(nbytes: int) -> str:
    """The size in the largest binary unit that divides it."""
    for unit, factor in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return f"{nbytes}B"


def _within_bounds(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"not a duration: {seconds}")
    if seconds > _LONGEST:
        raise ValueError("a duration is at most a hundred years")
    return float(seconds)


def _plain(number: Decimal) -> str:
    """Without an exponent and without trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
