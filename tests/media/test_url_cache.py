"""Downloads are reused as far as HTTP allows, and no further."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from router.faults import Fault, Reason
from router.media.budget import Amount, Budget
from router.media.cache import UrlCache
from router.media.fetch import Fetcher
from router.media.limits import FetchLimits
from router.media.resolve import PublicResolver
from router.media.signed import without_signature
from router.media.store import Store
from router.media.url import parse
from tests.media.server import Answer, Request, Server, fixed, raw, redirect, running

BODY = b"picture"
DIGEST = '"5d41402abc4b2a76b9719d911017c592"'


class Cache:
    """A URL cache with its budget and a clock that a test moves."""

    def __init__(self, *, nbytes: int = 10_000, internal: bool = True) -> None:
        self.now = 0.0
        self.budget = Budget(Amount(10_000_000))
        self.store: Store[Any] = Store(nbytes)
        resolver = PublicResolver(allow_private=internal, timeout=5, threads=1)
        self.fetcher = Fetcher(FetchLimits(retries=0), resolver)
        self.urls = UrlCache(self.store, self.fetcher, self.budget, clock=lambda: self.now)

    async def get(
        self, url: str, *, index: int = 0, max_bytes: int = 10_000, timeout: float = 20
    ) -> bytes:
        download = await self.urls.get(
            parse(url, index=index), index=index, max_bytes=max_bytes, timeout=timeout
        )
        assert self.budget.used.nbytes >= len(download.data)
        download.reservation.release()
        return download.data

    async def close(self) -> None:
        await self.urls.close()
        await self.fetcher.close()
        assert self.budget.used == Amount()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running() as server:
        yield server


@pytest.fixture
async def cache() -> AsyncIterator[Cache]:
    cache = Cache()
    yield cache
    await cache.close()


def tagged(etag: Callable[[], str], body: Callable[[], bytes], **headers: str) -> Answer:
    """Answers a matching If-None-Match with 304."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        same = request.headers.get("if-none-match") == etag()
        status = "304 Not Modified" if same else "200 OK"
        await fixed(b"" if same else body(), status=status, ETag=etag(), **headers)(request, writer)

    return answer


async def test_a_fresh_download_is_not_asked_for_again(server: Server, cache: Cache) -> None:
    server.routes["/x"] = fixed(BODY, Cache_Control="public, max-age=60")
    assert await cache.get(server.url("/x")) == BODY
    cache.now = 59.0
    assert await cache.get(server.url("/x")) == BODY
    assert len(server.requests) == 1
    cache.now = 60.0
    await cache.get(server.url("/x"))
    assert len(server.requests) == 2
    assert (cache.urls.counters.hits, cache.urls.counters.misses) == (1, 2)


async def test_the_age_an_answer_has_already_counts(server: Server, cache: Cache) -> None:
    server.routes["/x"] = fixed(BODY, Cache_Control="max-age=60", Age="50")
    await cache.get(server.url("/x"))
    cache.now = 11.0
    await cache.get(server.url("/x"))
    assert len(server.requests) == 2


async def test_different_queries_are_different_objects(server: Server, cache: Cache) -> None:
    server.routes["/x"] = fixed(BODY, Cache_Control="max-age=60")
    await cache.get(server.url("/x?id=1"))
    await cache.get(server.url("/x?id=2"))
    assert len(server.requests) == 2


@pytest.mark.parametrize("control", ["no-store", "private, max-age=60", "max-age=60, No-Store"])
async def test_what_may_not_be_kept_is_not_kept(server: Server, cache: Cache, control: str) -> None:
    server.routes["/x"] = fixed(BODY, Cache_Control=control, ETag=DIGEST)
    await cache.get(server.url("/x"))
    await cache.get(server.url("/x"))
    assert len(server.requests) == 2
    assert "if-none-match" not in server.requests[1].headers
    assert len(cache.store) == 0


@pytest.mark.parametrize(
    "lines",
    [
        b"Cache-Control: max-age=60\r\nCache-Control: no-store\r\n",
        b"Cache-Control: max-age=60\r\nVary: *\r\n",
        b"Cache-Control: max-age=60\r\nVary: Accept\r\nVary: Origin , *\r\n",
    ],
)
async def test_headers_in_several_lines_are_one_list(
    server: Server, cache: Cache, lines: bytes
) -> None:
    length = b"Content-Length: %d\r\n\r\n" % len(BODY)
    server.routes["/x"] = raw(b"HTTP/1.1 200 OK\r\n" + lines + length + BODY)
    assert await cache.get(server.url("/x")) == BODY
    assert await cache.get(server.url("/x")) == BODY
    assert len(server.requests) == 2
    assert len(cache.store) == 0


async def test_an_answer_that_varies_by_what_we_always_send_alike_is_kept(
    server: Server, cache: Cache
) -> None:
    server.routes["/x"] = fixed(BODY, Cache_Control="max-age=60", Vary="Accept-Encoding, Origin")
    await cache.get(server.url("/x"))
    await cache.get(server.url("/x"))
    assert len(server.requests) == 1


async def test_what_is_kept_does_not_stand_in_for_a_download_that_would_be_too_large(
    server: Server, cache: Cache
) -> None:
    server.routes["/x"] = tagged(lambda: DIGEST, lambda: BODY, Cache_Control="no-cache")
    assert await cache.get(server.url("/x")) == BODY
    with pytest.raises(Fault) as caught:
        await cache.get(server.url("/x"), max_bytes=len(BODY) - 1)
    assert caught.value.reason is Reason.MEDIA_TOO_LARGE
    assert await cache.get(server.url("/x"), max_bytes=len(BODY)) == BODY


async def test_an_answer_without_freshness_or_validator_is_not_kept(
    server: Server, cache: Cache
) -> None:
    server.routes["/x"] = fixed(BODY)
    await cache.get(server.url("/x"))
    assert len(cache.store) == 0


async def test_a_stale_download_is_confirmed_not_repeated(server: Server, cache: Cache) -> None:
    etag, body = '"1"', BODY
    server.routes["/x"] = tagged(lambda: etag, lambda: body, Cache_Control="no-cache")
    assert await cache.get(server.url("/x")) == BODY
    assert await cache.get(server.url("/x")) == BODY
    assert cache.urls.counters.revalidated == 1
    etag, body = '"2"', b"changed"
    assert await cache.get(server.url("/x")) == b"changed"


SIGNED = "/x?v=3&X-Amz-Signature={}&X-Amz-Date=2&X-Amz-Expires=60"


async def test_another_signature_is_always_put_to_the_host(server: Server, cache: Cache) -> None:
    server.routes["/x"] = tagged(lambda: DIGEST, lambda: BODY, Cache_Control="max-age=600")
    await cache.get(server.url(SIGNED.format("a")))
    assert await cache.get(server.url(SIGNED.format("b"))) == BODY
    assert [request.target for request in server.requests] == [
        SIGNED.format("a"),
        SIGNED.format("b"),
    ]
    assert cache.urls.counters.revalidated == 1


async def test_a_signature_the_host_refuses_gets_nothing_from_the_cache(
    server: Server, cache: Cache
) -> None:
    server.routes["/x"] = tagged(lambda: DIGEST, lambda: BODY, Cache_Control="max-age=600")
    await cache.get(server.url(SIGNED.format("a")))
    server.routes["/x"] = fixed(status="403 Forbidden")
    with pytest.raises(Fault) as caught:
        await cache.get(server.url(SIGNED.format("forged")))
    assert caught.value.reason is Reason.MEDIA_NOT_FOUND


@pytest.mark.parametrize("etag", ['"1"', 'W/"5d41402abc4b2a76b9719d911017c592"'])
async def test_a_tag_that_is_no_digest_proves_nothing_across_signatures(
    server: Server, cache: Cache, etag: str
) -> None:
    server.routes["/x"] = tagged(lambda: etag, lambda: BODY, Cache_Control="max-age=600")
    await cache.get(server.url(SIGNED.format("a")))
    await cache.get(server.url(SIGNED.format("b")))
    assert "if-none-match" not in server.requests[1].headers


async def test_a_redirect_is_followed_anew_each_time(server: Server, cache: Cache) -> None:
    server.routes["/x"] = redirect("/one")
    server.routes["/one"] = fixed(b"one", Cache_Control="max-age=600", ETag='"1"')
    server.routes["/two"] = tagged(lambda: '"1"', lambda: b"two")
    assert await cache.get(server.url("/x")) == b"one"
    server.routes["/x"] = redirect("/two")
    assert await cache.get(server.url("/x")) == b"two"


async def test_those_who_ask_together_cause_one_request(server: Server, cache: Cache) -> None:
    go = asyncio.Event()

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await fixed(BODY)(request, writer)

    server.routes["/x"] = answer
    asking = [asyncio.create_task(cache.get(server.url("/x"))) for _ in range(8)]
    await server.reached(requests=1)
    asking[0].cancel()
    go.set()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1:] == [BODY] * 7
    assert len(server.requests) == 1


async def test_a_shared_failure_names_each_callers_own_item(server: Server, cache: Cache) -> None:
    server.routes["/x"] = fixed(status="404 Not Found")
    outcomes = await asyncio.gather(
        *(cache.get(server.url("/x"), index=index) for index in (2, 7)), return_exceptions=True
    )
    for index, fault in zip((2, 7), outcomes, strict=True):
        assert isinstance(fault, Fault)
        assert fault.metadata["index"] == str(index)
        assert f"item {index}:" in fault.message


async def test_who_has_more_time_does_not_wait_for_the_download_of_who_has_less(
    server: Server, cache: Cache
) -> None:
    go = asyncio.Event()

    async def slow(request: Request, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await fixed(BODY)(request, writer)

    server.routes["/x"] = slow
    impatient = asyncio.create_task(cache.get(server.url("/x"), timeout=0.2))
    await server.reached(requests=1)
    patient = asyncio.create_task(cache.get(server.url("/x")))
    with pytest.raises(Fault) as caught:
        await impatient
    assert caught.value.reason is Reason.MEDIA_FETCH_TIMEOUT
    go.set()
    assert await patient == BODY


@pytest.mark.parametrize("path", ["", "a" * 2000])
async def test_files_of_nothing_fill_the_store_too(server: Server, path: str) -> None:
    cache = Cache(nbytes=20_000)
    for number in range(100):
        name = f"/{path}{number}"
        server.routes[name] = fixed(b"", Cache_Control="max-age=60", ETag=DIGEST)
        await cache.get(server.url(name))
    kept = len(cache.store)
    assert 0 < kept < 40
    assert kept * len(path) < cache.store.nbytes <= 20_000
    await cache.close()


async def test_closing_ends_a_running_download(server: Server) -> None:
    cache = Cache()
    server.routes["/x"] = raw(b"", close=False)
    asking = asyncio.create_task(cache.get(server.url("/x")))
    await server.reached(requests=1)
    await cache.close()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_with_reuse_off_every_one_asks(server: Server) -> None:
    cache = Cache(nbytes=0)
    server.routes["/x"] = fixed(BODY, Cache_Control="max-age=60", ETag=DIGEST)
    await cache.get(server.url("/x"))
    await cache.get(server.url("/x"))
    assert len(server.requests) == 2
    await cache.close()


async def test_a_kept_download_is_still_judged(server: Server) -> None:
    cache = Cache(internal=False)
    url = parse(server.url("/x"), index=0)
    with pytest.raises(Fault) as caught:
        await cache.urls.get(url, index=0, max_bytes=100, timeout=5)
    assert caught.value.reason is Reason.MEDIA_HOST_FORBIDDEN
    await cache.close()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/x", "/x"),
        ("/x?id=1", "/x?id=1"),
        ("/x?sp=1&se=2&expires=3", "/x?sp=1&se=2&expires=3"),
        (SIGNED.format("abc"), "/x?v=3"),
        ("/x?Expires=1&Signature=2&Key-Pair-Id=3", "/x"),
        ("/x?sv=2&sp=r&sig=abc&se=3&id=7", "/x?id=7"),
        ("/x?X-Goog-Signature=1&X-Goog-Date=2&id=7&", "/x?id=7&"),
    ],
)
def test_only_the_parameters_of_a_signature_are_left_out(target: str, expected: str) -> None:
    assert without_signature(target) == expected
