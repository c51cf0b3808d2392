"""Which addresses a media host may have, and the look-up that enforces it.

The check sits inside the resolver that the HTTP connector dials through, so
the addresses that are dialled are the very objects that were judged. A second
look-up, which could answer differently, does not happen.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from aiohttp.abc import AbstractResolver, ResolveResult

from router.faults import Fault, Reason
from router.media.url import MediaUrl

Address = IPv4Address | IPv6Address
Lookup = Callable[[str, int], Sequence[str]]

# All of them by name, because what `ipaddress` calls private differs between
# releases of Python. The last one is public by number, but it is the agent
# that every Azure host offers its guests, and answers nobody else.
_V4_REFUSED = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments; clouds put metadata services there
        "192.0.2.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "168.63.129.16/32",
    )
)
# Only global unicast space is public; within it, special purposes, Teredo,
# documentation and 6to4, which carry an IPv4 address of anyone's choice.
_V6_PUBLIC = IPv6Network("2000::/3")
_V6_REFUSED = (
    IPv6Network("2001::/23"),
    IPv6Network("2001:db8::/32"),
    IPv6Network("2002::/16"),
    IPv6Network("3fff::/20"),
)


class HostForbidden(Exception):
    """The host is, or resolves to, an address that media may not come from."""


class HostUnknown(Exception):
    """The name could not be resolved."""


class HostSilent(Exception):
    """The name server does not answer in time.

    Not a TimeoutError, which is an OSError and so a refused connection to aiohttp.
    """


def is_public(address: Address) -> bool:
    """Whether the address lies on the public Internet (IANA special-purpose registries)."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _V4_REFUSED)
    # Mapped (::ffff:0:0/96), NAT64 (64:ff9b::/96), unique local, link-local and
    # multicast addresses all lie outside 2000::/3.
    return address in _V6_PUBLIC and not any(address in network for network in _V6_REFUSED)


def domain_allowed(host: str, domains: Sequence[str]) -> bool:
    """Whether `host` is one of the domains or below one; no domains allow every host."""
    if not domains:
        return True
    names = (domain.lower().strip(".") for domain in domains)
    return any(host == name or host.endswith("." + name) for name in names)


class PublicResolver(AbstractResolver):
    """Looks names up and lets only judged addresses out.

    Every address of a name must be public, not just one of them: the connector
    may dial any. Look-ups run in threads of their own, so that a dead name
    server keeps nothing else waiting.
    """

    def __init__(
        self,
        *,
        allow_private: bool,
        timeout: float,
        threads: int = 64,
        lookup: Lookup | None = None,
    ) -> None:
        self._allow_private = allow_private
        self._timeout = timeout
        self._lookup = lookup or _getaddrinfo
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="resolve")

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Every address of the host, all judged.

        Raises HostForbidden, HostUnknown, HostSilent.
        """
        loop = asyncio.get_running_loop()
        look = loop.run_in_executor(self._threads, self._lookup, host, port)
        try:
            texts = await asyncio.wait_for(look, self._timeout)
        except TimeoutError:
            raise HostSilent from None
        except (OSError, UnicodeError):
            raise HostUnknown from None
        found = [ip_address(text) for text in dict.fromkeys(texts)]
        if not found:
            raise HostUnknown
        for address in found:
            self.judge(address)
        return found

    def judge(self, address: Address) -> None:
        """Raises HostForbidden unless the address may be dialled."""
        if not (self._allow_private or is_public(address)):
            raise HostForbidden

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The connector's question; its answer is what gets dialled."""
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self.addresses(host, port)
        ]

    async def close(self) -> None:
        """Drops waiting look-ups; running ones end on their own."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def forbidden(url: MediaUrl, index: int) -> Fault:
    """The fault for a host that may not be asked; it does not say which address it has."""
    return Fault.of_item(
        Reason.MEDIA_HOST_FORBIDDEN,
        index,
        f"the host {url.host} is not one that media may be fetched from",
        host=url.host,
    )


def _getaddrinfo(host: str, port: int) -> Sequence[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(info[4][0]) for info in infos]
