"""One download: judged at every hop, cut off at every limit.

Redirects are followed by hand, because each one is a new reference from a
stranger. The body is measured while it streams in, whatever Content-Length
said, and its memory is reserved before it is read.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from router.faults import Fault, Reason
from router.media.budget import Reservation
from router.media.download import (
    READ_SIZE,
    Download,
    Retry,
    Validators,
    failed,
    read_body,
    timed_out,
    too_large,
)
from router.media.limits import FetchLimits
from router.media.resolve import (
    HostForbidden,
    HostSilent,
    HostUnknown,
    PublicResolver,
    domain_allowed,
    forbidden,
)
from router.media.url import MediaUrl, join

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Digits of an age: thirty years will do, and Python reads no number of thousands of them.
_AGE_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Response:
    """A finished download. `data` is None where the host said 304 Not Modified."""

    data: bytes | None
    validators: Validators
    cache_control: str = ""
    age: int = 0
    redirected: bool = False
    # `Vary: *`: it depends on more than the request, so it answers no other one.
    single: bool = False


class Fetcher:
    """Downloads http and https references."""

    def __init__(
        self,
        limits: FetchLimits,
        resolver: PublicResolver,
        *,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._limits = limits
        self._resolver = resolver
        self._rng = rng
        self._direct: aiohttp.ClientSession | None = None
        self._proxied: aiohttp.ClientSession | None = None

    async def warm_up(self) -> None:
        """Makes the HTTP session now instead of with the first download."""
        self._session(None)

    async def close(self) -> None:
        """Closes the sessions and their connections."""
        for session in (self._direct, self._proxied):
            if session is not None:
                await session.close()
        self._direct = self._proxied = None
        await self._resolver.close()

    def judge(self, url: MediaUrl, index: int) -> None:
        """What can be judged without a look-up. Raises Fault MEDIA_HOST_FORBIDDEN."""
        if not domain_allowed(url.host, self._limits.allowed_domains):
            raise forbidden(url, index)
        if url.address is not None:
            try:
                self._resolver.judge(url.address)
            except HostForbidden:
                raise forbidden(url, index) from None

    async def judge_addresses(self, url: MediaUrl, index: int) -> None:
        """Everything `fetch` would refuse before it dials.

        Raises Fault MEDIA_HOST_FORBIDDEN, MEDIA_FETCH_FAILED for an unknown
        name, MEDIA_FETCH_TIMEOUT for a look-up that takes too long.
        """
        self.judge(url, index)
        if url.address is not None or self._proxy(url) is not None:
            return
        try:
            await self._resolver.addresses(url.host, url.port)
        except HostForbidden:
            raise forbidden(url, index) from None
        except HostUnknown:
            raise failed(url, index, "its name cannot be resolved") from None
        except HostSilent:
            raise timed_out(url, index, self._limits.connect_timeout) from None

    async def fetch(
        self,
        url: MediaUrl,
        *,
        index: int,
        max_bytes: int,
        timeout: float,
        reservation: Reservation,
        validators: Validators | None = None,
    ) -> Response:
        """Downloads one reference, following redirects, within `timeout` seconds in all.

        `reservation` grows ahead of the bytes. Raises Fault MEDIA_HOST_FORBIDDEN,
        MEDIA_URL_INVALID, MEDIA_SCHEME_UNSUPPORTED, MEDIA_NOT_FOUND (4xx),
        MEDIA_TOO_LARGE, MEDIA_FETCH_FAILED, MEDIA_FETCH_TIMEOUT, MEDIA_BUDGET_FULL.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._with_retries(
                    Download(url, index, max_bytes, reservation, validators)
                )
        except TimeoutError:
            raise timed_out(url, index, timeout) from None

    async def beginning(self, url: MediaUrl, *, index: int, nbytes: int) -> bytes:
        """At most the first `nbytes` of a reference, which may be all that is transferred.

        Redirects are followed and hosts judged as for a download; there is no
        second attempt and no timeout. Raises Fault as `fetch`.
        """
        headers = {"Range": f"bytes=0-{nbytes - 1}"}
        for _ in range(self._limits.max_redirects + 1):
            self.judge(url, index)
            try:
                async with self._exchange(url, index, headers) as response:
                    location = response.headers.get("Location")
                    if response.status not in _REDIRECTS or location is None:
                        if response.status not in (200, 206):
                            raise failed(url, index, f"it answered {response.status}")
                        # A host that knows no ranges sends all of it: leaving ends that.
                        return await _first(response, nbytes)
            except Retry as failure:
                raise failed(url, index, str(failure)) from None
            url = join(url, location, index=index)
        raise failed(url, index, f"it redirects more than {self._limits.max_redirects} times")

    async def _with_retries(self, download: Download) -> Response:
        for attempt in range(self._limits.retries + 1):
            try:
                return await self._follow(download)
            except Retry as failure:
                if attempt == self._limits.retries:
                    raise failed(download.url, download.index, str(failure)) from None
            pause = self._limits.retry_backoff * 2**attempt
            await asyncio.sleep(pause * (0.5 + self._rng()))
        raise AssertionError("the last attempt returns or raises")

    async def _follow(self, download: Download) -> Response:
        url, index = download.url, download.index
        for hop in range(self._limits.max_redirects + 1):
            self.judge(url, index)
            async with self._exchange(url, index, download.conditions()) as response:
                location = response.headers.get("Location")
                if response.status not in _REDIRECTS or location is None:
                    received = await self._receive(response, url, download)
                    return replace(received, redirected=hop > 0)
            url = join(url, location, index=index)
        raise failed(url, index, f"it redirects more than {self._limits.max_redirects} times")

    @asynccontextmanager
    async def _exchange(
        self, url: MediaUrl, index: int, headers: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request and its answer, with the client library's errors made ours."""
        proxy = self._proxy(url)
        try:
            async with self._session(proxy).get(
                # `encoded` keeps path and query as they are: a signature covers them.
                URL(url.dialled, encoded=True),
                headers={"Accept-Encoding": "identity", **headers},
                allow_redirects=False,
                proxy=proxy,
            ) as response:
                yield response
        except HostForbidden:
            raise forbidden(url, index) from None
        except HostUnknown:
            raise failed(url, index, "its name cannot be resolved") from None
        except (HostSilent, aiohttp.ServerTimeoutError):
            raise timed_out(url, index, self._limits.connect_timeout) from None
        except aiohttp.ClientSSLError:
            raise failed(url, index, "it offers no trustworthy TLS") from None
        except aiohttp.ClientConnectorError:
            raise failed(url, index, "it refuses connections") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            raise Retry("the connection broke") from None
        except aiohttp.ClientError:
            raise failed(url, index, "its answer is not valid HTTP") from None

    async def _receive(
        self, response: aiohttp.ClientResponse, url: MediaUrl, download: Download
    ) -> Response:
        status = response.status
        if status == 304 and download.validators is not None:
            return _response(None, response)
        if status >= 500:
            raise Retry(f"it answered {status}")
        if not 200 <= status < 300 or status in (204, 205, 206):
            raise Fault.of_item(
                Reason.MEDIA_NOT_FOUND,
                download.index,
                f"the host {url.host} answered {status}",
                host=url.host,
                http_status=status,
            )
        declared = response.content_length
        if declared is not None and declared > download.max_bytes:
            raise too_large(download)
        return _response(await read_body(response, download), response)

    def _session(self, proxy: str | None) -> aiohttp.ClientSession:
        if proxy is not None:
            if self._proxied is None:
                self._proxied = self._open(aiohttp.ThreadedResolver())
            return self._proxied
        if self._direct is None:
            self._direct = self._open(self._resolver)
        return self._direct

    def _open(self, resolver: aiohttp.abc.AbstractResolver) -> aiohttp.ClientSession:
        limits = self._limits
        return aiohttp.ClientSession(
            # No bound over all hosts: a host that does not answer fills its own
            # share of connections and nobody else's. The media budget bounds the sum.
            connector=aiohttp.TCPConnector(
                resolver=resolver,
                limit=0,
                limit_per_host=limits.connections_per_host,
                use_dns_cache=False,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout),
            headers={"User-Agent": limits.user_agent, "Accept": "image/*,video/*,*/*;q=0.5"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_SIZE,
        )

    def _proxy(self, url: MediaUrl) -> str | None:
        if not self._limits.use_env_proxies or proxy_bypass(url.host):
            return None
        return getproxies().get(url.scheme)


def _response(data: bytes | None, response: aiohttp.ClientResponse) -> Response:
    headers = response.headers
    age = headers.get("Age", "")
    return Response(
        data,
        Validators(headers.get("ETag"), headers.get("Last-Modified")),
        cache_control=_joined(response, "Cache-Control"),
        age=int(age[:_AGE_DIGITS]) if age.isascii() and age.isdigit() else 0,
        single="*" in (part.strip() for part in _joined(response, "Vary").split(",")),
    )


def _joined(response: aiohttp.ClientResponse, name: str) -> str:
    """A header that is a list, whose parts may come in several lines."""
    return ", ".join(response.headers.getall(name, ()))


async def _first(response: aiohttp.ClientResponse, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = await response.content.read(nbytes - len(data))
        if not piece:
            break
        data += piece
    return data
