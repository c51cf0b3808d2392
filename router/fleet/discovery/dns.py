"""Workers behind a DNS name that has an address for each, as a headless Service has."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from router.fleet.endpoint import Endpoint
from router.observe.logging import get_logger

_log = get_logger("discovery")

# All addresses (IPv4, or IPv6 without brackets) of a host. Raises OSError.
Resolve = Callable[[str], Awaitable[Sequence[str]]]


class DnsDiscovery:
    """Resolves HOST:PORT every `interval` seconds; each address is a worker.

    gRPC resolves a name once for as long as the connection stands; here the
    name is asked for again and again, and every address has its own channel, so
    that pods that come are used and streams on pods that stay are not touched.
    A failed resolution changes nothing: a name server that is down must not
    take the fleet down, and workers that are really gone fail their checks.
    """

    name = "dns"

    def __init__(self, name: str, *, interval: float = 5.0, resolve: Resolve | None = None) -> None:
        host, _, port = name.rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port)
        self._interval = interval
        self._resolve = resolve or SystemResolver()

    async def sets(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """See `Discovery.sets`."""
        trouble = ""
        while True:
            try:
                async with asyncio.timeout(max(self._interval, 1.0)):
                    addresses = await self._resolve(self._host)
            except OSError as error:  # TimeoutError is one
                why = str(error) or type(error).__name__
                if why != trouble:
                    _log.warning("discovery_dns_failed", name=self._host, why=why)
                    trouble = why
            else:
                trouble = ""
                yield [
                    Endpoint(f"[{a}]:{self._port}" if ":" in a else f"{a}:{self._port}")
                    for a in sorted(set(addresses))
                ]
            await asyncio.sleep(self._interval)


class SystemResolver:
    """The system's getaddrinfo, in a thread of its own.

    It can hang for half a minute and cannot be stopped. One thread means that
    questions do not pile up meanwhile in those that everybody shares.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dns")

    async def __call__(self, host: str) -> list[str]:
        """Every address of a host. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, _look_up, host)
        return [str(entry[4][0]) for entry in found]


def _look_up(host: str) -> list[Any]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
