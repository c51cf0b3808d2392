"""Workers listed in a file that others keep up to date.

TOML, or JSON where the name ends with `.json`:

    [[workers]]
    address = "10.0.0.1:50051"
    role = "prefill"              # optional: both, prefill, decode, encode
    model = "Qwen/Qwen3-VL-8B"    # optional
    labels = { zone = "a" }       # optional
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import tomllib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from router.config import worker_address
from router.fleet.endpoint import Endpoint, Role, role_named
from router.observe.logging import get_logger

_log = get_logger("discovery")

_KEYS = {"address", "role", "model", "labels"}
_MAX_BYTES = 64 << 20


class FileDiscovery:
    """Reads the file every `interval` seconds.

    It looks at the content, not at times of change: files that are replaced,
    linked anew (as Kubernetes does with ConfigMaps) or written twice within a
    clock tick are all seen. A file that cannot be read changes nothing.
    """

    name = "file"

    def __init__(self, path: Path, *, interval: float = 1.0) -> None:
        self._path = path
        self._interval = interval

    async def sets(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """See `Discovery.sets`."""
        seen: bytes | None = None
        trouble = ""
        while True:
            try:
                content = await asyncio.to_thread(_content, self._path)
                if content != seen:
                    found = parse(content, is_json=self._path.suffix == ".json")
                    seen, trouble = content, ""
                    yield found
            except (OSError, ValueError) as error:
                # Content that comes back after an error is what stands already.
                why = error.strerror or "" if isinstance(error, OSError) else str(error)
                if why != trouble:
                    _log.error("discovery_file_broken", file=self._path.name, why=why)
                    trouble = why
            await asyncio.sleep(self._interval)


def parse(content: bytes, *, is_json: bool = False) -> list[Endpoint]:
    """The workers of a file. Raises ValueError, whose message says what is wrong where.

    A file without the key `workers` is taken for one that is being written, not
    for an empty fleet: that is written as `workers = []`.
    """
    text = content.decode("utf-8")
    try:
        document = json.loads(text) if is_json else tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(document, dict) or not isinstance(document.get("workers"), list):
        raise ValueError("there is no list of workers")
    endpoints = [_endpoint(i, entry) for i, entry in enumerate(document["workers"])]
    addresses = [endpoint.address for endpoint in endpoints]
    for i, address in enumerate(addresses):
        if address in addresses[:i]:
            raise ValueError(f"workers[{i}]: {address} is listed twice")
    return endpoints


def _content(path: Path) -> bytes:
    """What is in the file. Raises OSError, or ValueError for what is no file to be read whole."""
    # A pipe without a writer would hold the thread for ever; so it is opened without waiting.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    return content


def _endpoint(index: int, entry: Any) -> Endpoint:
    try:
        if not isinstance(entry, dict):
            raise ValueError("not a table")
        unknown = sorted(entry.keys() - _KEYS)
        if unknown:
            raise ValueError(f"unknown key: {', '.join(unknown)}")
        labels = entry.get("labels", {})
        if not isinstance(labels, dict):
            raise ValueError("labels is not a table")
        return Endpoint(
            address=worker_address(_text(entry, "address")),
            role=role_named(_text(entry, "role")) if "role" in entry else Role.BOTH,
            model=_text(entry, "model") if "model" in entry else "",
            labels={name: str(value) for name, value in labels.items()},
        )
    except ValueError as error:
        raise ValueError(f"workers[{index}]: {error}") from None


def _text(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} is missing" if value is None else f"{key} is not a text")
    return value
