"""How values are written: durations, sizes, lists, addresses."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator
from pydantic_settings import NoDecode

from router.units import parse_duration, parse_size

# One that begins or ends with a dot is known too.
_DOMAIN = re.compile(r"\.?[\w-]+(\.[\w-]+)*\.?", re.ASCII)


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _domains(names: tuple[str, ...]) -> tuple[str, ...]:
    # With a scheme, a port or a star it would be the domain of no host, and refuse all media.
    for name in names:
        if not _DOMAIN.fullmatch(name) and not _is_address(name):
            raise ValueError(f"not a domain: {name!r} (write example.org, in ASCII)")
    return names


def _is_address(text: str) -> bool:
    try:
        return bool(ip_address(text))
    except ValueError:
        return False


def _background(text: str) -> str:
    if not re.fullmatch("white|#[0-9A-Fa-f]{6}", text):
        raise ValueError(f"not a background: {text!r} (write white or #RRGGBB)")
    return text


def _listener(text: str) -> str:
    # gRPC itself takes a port modulo 65536, and anything for the name of a host.
    if not text or (text.startswith("unix:") and text != "unix:"):
        return text
    host, _, port = text.rpartition(":")
    bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or bare or "/" in host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"not an address to listen on: {text!r} (write HOST:PORT or unix:PATH)")
    return text


def _collector(text: str) -> str:
    if not text:
        return text
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not a collector: {text!r} (write http://HOST:PORT or https://HOST:PORT)")
    return text


Duration = Annotated[float, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Domains = Annotated[Names, AfterValidator(_domains)]
Background = Annotated[str, AfterValidator(_background)]
# Empty where nothing is to listen.
Listener = Annotated[str, AfterValidator(_listener)]
# Empty where traces go nowhere.
Collector = Annotated[str, AfterValidator(_collector)]

PolicyName = Literal[
    "round_robin", "random", "power_of_two", "least_load", "consistent_hash", "prefix"
]


def worker_address(text: str) -> str:
    """HOST:PORT from `grpc://HOST:PORT` or `HOST:PORT`. Raises ValueError."""
    address = text.strip().removeprefix("grpc://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise ValueError(f"not a worker's address: {text!r} (write grpc://HOST:PORT)")
    if "/" in host or " " in host or not host.isprintable():
        raise ValueError(f"not a worker's address: {text!r} (write grpc://HOST:PORT)")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"not a worker's address: {text!r} (write grpc://[IPV6]:PORT)")
    return f"{host}:{int(port)}"
