"""How values are written: durations, sizes, lists, addresses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from router.units import parse_duration, parse_size


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Duration = Annotated[float, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]

PolicyName = Literal[
    "round_robin", "random", "power_of_two", "least_load", "consistent_hash", "prefix"
]


def worker_address(text: str) -> str:
    """HOST:PORT from `grpc://HOST:PORT` or `HOST:PORT`. Raises ValueError."""
    address = text.strip().removeprefix("grpc://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in host:
        raise ValueError(f"not a worker's address: {text!r} (write grpc://HOST:PORT)")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"not a worker's address: {text!r} (write grpc://[IPV6]:PORT)")
    return f"{host}:{int(port)}"
