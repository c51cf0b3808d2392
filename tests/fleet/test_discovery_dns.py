"""Workers behind a DNS name."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing

from router.fleet.discovery.dns import DnsDiscovery


class Zone:
    """What a name resolves to at each question; the last answer stays."""

    def __init__(self, *answers: list[str] | OSError) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer


async def sets_of(name: str, zone: Zone, count: int) -> list[list[str]]:
    found: list[list[str]] = []
    async with (
        asyncio.timeout(10),
        aclosing(DnsDiscovery(name, interval=0.001, resolve=zone).sets()) as sets,
    ):
        async for endpoints in sets:
            found.append([endpoint.address for endpoint in endpoints])
            if len(found) == count:
                break
    return found


async def test_every_address_is_a_worker() -> None:
    zone = Zone(["10.0.0.2", "10.0.0.1"], ["10.0.0.1", "fd00::7"])
    assert await sets_of("workers.example:50051", zone, 2) == [
        ["10.0.0.1:50051", "10.0.0.2:50051"],
        ["10.0.0.1:50051", "[fd00::7]:50051"],
    ]
    assert set(zone.asked) == {"workers.example"}


async def test_a_name_server_that_fails_says_nothing_about_the_workers() -> None:
    failed = socket.gaierror(socket.EAI_AGAIN, "try again")
    zone = Zone(["10.0.0.1"], failed, TimeoutError(), ["10.0.0.2"])
    assert await sets_of("workers.example:1", zone, 2) == [["10.0.0.1:1"], ["10.0.0.2:1"]]


async def test_the_system_s_resolver_is_asked_by_default() -> None:
    async with asyncio.timeout(10), aclosing(DnsDiscovery("localhost:7").sets()) as sets:
        found = [endpoint.address for endpoint in await anext(sets)]
    assert "127.0.0.1:7" in found or "[::1]:7" in found
    assert len(found) == len(set(found))
