"""Downloads are judged at every hop and cut off at every limit."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Sequence

import pytest

from router.faults import Fault, Reason
from router.media.budget import Amount, Budget
from router.media.download import Validators
from router.media.fetch import Fetcher, Response
from router.media.limits import FetchLimits
from router.media.resolve import PublicResolver
from router.media.url import parse
from tests.media.server import Answer, Request, Server, fixed, raw, redirect, running

BODY = b"\x89PNG and so on"


class Internet:
    """Names to addresses; every look-up is noted."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.asked: list[str] = []

    def lookup(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        try:
            return self.names[host]
        except KeyError:
            raise socket.gaierror from None


class OpenLoopback(PublicResolver):
    """Judges like the real one, but takes 127.0.0.1, where the test servers are, for public."""

    def judge(self, address: object) -> None:
        if str(address) != "127.0.0.1":
            super().judge(address)  # type: ignore[arg-type]


class Client:
    """A fetcher with its budget."""

    def __init__(self, limits: FetchLimits, internet: Internet) -> None:
        resolver = OpenLoopback(allow_private=False, timeout=5, threads=4, lookup=internet.lookup)
        self.fetcher = Fetcher(limits, resolver, rng=lambda: 0.0)
        self.budget = Budget(Amount(64 * 1024 * 1024, 1), wait=0.01)

    async def get(
        self,
        url: str,
        *,
        max_bytes: int = 1024 * 1024,
        timeout: float = 20.0,
        validators: Validators | None = None,
    ) -> Response:
        reservation = self.budget.open()
        try:
            return await self.fetcher.fetch(
                parse(url, index=3),
                index=3,
                max_bytes=max_bytes,
                timeout=timeout,
                reservation=reservation,
                validators=validators,
            )
        finally:
            reservation.release()
            assert self.budget.used == Amount()

    async def refused(self, url: str, **how: float) -> Fault:
        with pytest.raises(Fault) as caught:
            await self.get(url, **how)  # type: ignore[arg-type]
        assert caught.value.metadata["index"] == "3"
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        return caught.value


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running() as server:
        yield server


@pytest.fixture
def internet() -> Internet:
    return Internet()


@pytest.fixture
async def client(internet: Internet) -> AsyncIterator[Client]:
    client = Client(FetchLimits(retry_backoff=0.0), internet)
    yield client
    await client.fetcher.close()


async def test_a_picture_is_fetched_with_host_header_and_query_untouched(
    server: Server, client: Client, internet: Internet
) -> None:
    internet.names["img.example"] = ["127.0.0.1"]
    server.routes["/a%20b/%2e%2e/x.png"] = fixed(BODY, ETag='"v1"', Cache_Control="max-age=60")
    target = "/a%20b/%2e%2e/x.png?sig=a%2Fb+c&x=%7E"
    response = await client.get(server.url(target, "img.example") + "#frag")
    assert response.data == BODY
    assert (response.validators.etag, response.cache_control) == ('"v1"', "max-age=60")
    (request,) = server.requests
    assert request.target == target
    assert request.headers["host"] == f"img.example:{server.port}"
    assert request.headers["user-agent"] == "mmrouter"
    assert "cookie" not in request.headers


async def test_each_dial_asks_the_resolver_once_and_a_kept_connection_not_at_all(
    server: Server, client: Client, internet: Internet
) -> None:
    internet.names["img.example"] = ["127.0.0.1"]
    server.routes["/x"] = fixed(BODY)
    for _ in range(3):
        await client.get(server.url("/x", "img.example"))
    assert internet.asked == ["img.example"]
    assert server.connections == 1


@pytest.mark.parametrize(
    "addresses",
    [["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["::ffff:127.0.0.1"], ["64:ff9b::1"], ["fe80::1%lo"]],
)
async def test_a_name_with_a_private_address_is_not_dialled(
    server: Server, client: Client, internet: Internet, addresses: list[str]
) -> None:
    internet.names["inside.example"] = addresses
    fault = await client.refused(server.url("/x", "inside.example"))
    assert fault.reason is Reason.MEDIA_HOST_FORBIDDEN
    assert addresses[0] not in fault.message
    assert server.connections == 0


@pytest.mark.parametrize("host", ["10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]"])
async def test_a_private_address_is_not_dialled(client: Client, host: str) -> None:
    fault = await client.refused(f"http://{host}/latest/meta-data")
    assert fault.reason is Reason.MEDIA_HOST_FORBIDDEN


async def test_a_name_that_changes_its_address_between_hops_is_judged_again(
    server: Server, client: Client, internet: Internet
) -> None:
    answers = [["127.0.0.1"], ["10.0.0.1"]]
    internet.names["rebind.example"] = []
    client.fetcher._resolver._lookup = lambda host, port: answers.pop(0)  # type: ignore[method-assign]
    # Connection: close makes the second hop dial afresh.
    server.routes["/a"] = raw(
        b"HTTP/1.1 302 Found\r\nLocation: /b\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )
    fault = await client.refused(server.url("/a", "rebind.example"))
    assert fault.reason is Reason.MEDIA_HOST_FORBIDDEN
    assert [request.target for request in server.requests] == ["/a"]


async def test_redirects_are_followed_up_to_the_limit(server: Server, client: Client) -> None:
    for hop in range(5):
        server.routes[f"/{hop}"] = redirect(f"/{hop + 1}")
    server.routes["/5"] = fixed(BODY)
    response = await client.get(server.url("/0"))
    assert (response.data, response.redirected) == (BODY, True)
    server.routes["/5"] = redirect("/6")
    server.routes["/6"] = fixed(BODY)
    fault = await client.refused(server.url("/0"))
    assert fault.reason is Reason.MEDIA_FETCH_FAILED
    assert server.requests[-1].target == "/5"


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://10.0.0.1/", Reason.MEDIA_HOST_FORBIDDEN),
        ("http://inside.example/", Reason.MEDIA_HOST_FORBIDDEN),
        ("http://[::1]:80/", Reason.MEDIA_HOST_FORBIDDEN),
        ("file:///etc/passwd", Reason.MEDIA_SCHEME_UNSUPPORTED),
        ("gopher://a.example/", Reason.MEDIA_SCHEME_UNSUPPORTED),
        (r"http://1.1.1.1\@10.0.0.1/", Reason.MEDIA_URL_INVALID),
        ("http://u:p@1.1.1.1/", Reason.MEDIA_URL_INVALID),
        ("http://0x7f000001/", Reason.MEDIA_URL_INVALID),
        ("http://nowhere.example/", Reason.MEDIA_FETCH_FAILED),
    ],
)
async def test_each_redirect_is_judged_like_a_fresh_reference(
    server: Server, client: Client, internet: Internet, location: str, reason: Reason
) -> None:
    internet.names["inside.example"] = ["192.168.0.1"]
    server.routes["/x"] = redirect(location)
    fault = await client.refused(server.url("/x"))
    assert fault.reason is reason
    assert len(server.requests) == 1


async def test_only_allowed_domains_are_asked_first_hop_and_later(
    server: Server, internet: Internet
) -> None:
    client = Client(FetchLimits(allowed_domains=("good.example",)), internet)
    internet.names |= {"img.good.example": ["127.0.0.1"], "bad.example": ["127.0.0.1"]}
    server.routes["/x"] = redirect(server.url("/y", "bad.example"))
    fault = await client.refused(server.url("/x", "bad.example"))
    assert (fault.reason, server.connections) == (Reason.MEDIA_HOST_FORBIDDEN, 0)
    fault = await client.refused(server.url("/x", "img.good.example"))
    assert (fault.reason, len(server.requests)) == (Reason.MEDIA_HOST_FORBIDDEN, 1)
    await client.fetcher.close()


@pytest.mark.parametrize("status", ["400 Bad", "401 No", "403 Forbidden", "404 Not Found", "410 G"])
async def test_a_client_error_of_the_host_is_not_found_and_not_repeated(
    server: Server, client: Client, status: str
) -> None:
    server.routes["/x.jpg"] = fixed(b"<html>secret</html>", status=status)
    fault = await client.refused(server.url("/x.jpg?token=SECRET"))
    assert fault.reason is Reason.MEDIA_NOT_FOUND
    assert fault.metadata["http_status"] == status[:3]
    assert "SECRET" not in fault.message + str(fault.metadata)
    assert "x.jpg" not in fault.message
    assert len(server.requests) == 1


async def test_a_server_error_is_repeated_a_bounded_number_of_times(
    server: Server, client: Client
) -> None:
    server.routes["/x"] = fixed(status="503 Busy")
    fault = await client.refused(server.url("/x"))
    assert fault.reason is Reason.MEDIA_FETCH_FAILED
    assert len(server.requests) == 3


async def test_a_server_error_that_passes_is_overcome(server: Server, client: Client) -> None:
    answers = [fixed(status="500 Oops"), raw(b""), fixed(BODY)]

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await answers.pop(0)(request, writer)

    server.routes["/x"] = answer
    assert (await client.get(server.url("/x"))).data == BODY


async def test_a_refused_connection_is_a_failed_fetch(client: Client) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        fault = await client.refused(f"http://127.0.0.1:{port}/")
    assert fault.reason is Reason.MEDIA_FETCH_FAILED


async def test_an_unknown_name_is_a_failed_fetch(client: Client) -> None:
    fault = await client.refused("http://nowhere.example/")
    assert fault.reason is Reason.MEDIA_FETCH_FAILED


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n",
        b"not http at all\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhello",
    ],
)
async def test_an_answer_that_breaks_off_or_is_nonsense_is_a_failed_fetch(
    server: Server, client: Client, answer: bytes
) -> None:
    server.routes["/x"] = raw(answer)
    fault = await client.refused(server.url("/x"))
    assert fault.reason is Reason.MEDIA_FETCH_FAILED


async def test_bytes_beyond_the_content_length_are_not_taken(
    server: Server, client: Client
) -> None:
    server.routes["/x"] = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + b"x" * 5000)
    try:
        assert (await client.get(server.url("/x"))).data == b"x" * 10
    except Fault as fault:
        assert fault.reason is Reason.MEDIA_FETCH_FAILED


async def test_a_declared_length_over_the_limit_is_refused_unread(
    server: Server, client: Client
) -> None:
    server.routes["/x"] = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n")
    fault = await client.refused(server.url("/x"))
    assert fault.reason is Reason.MEDIA_TOO_LARGE
    assert fault.metadata["limit"] == str(1024 * 1024)


def endless(server: Server, chunk: bytes) -> Answer:
    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
            server.sent += len(chunk)

    return answer


async def test_an_endless_body_is_cut_off_at_the_limit(server: Server, client: Client) -> None:
    server.routes["/x"] = endless(server, b"x" * 65536)
    limit = 20 * 1024 * 1024
    fault = await client.refused(server.url("/x"), max_bytes=limit)
    assert fault.reason is Reason.MEDIA_TOO_LARGE
    # What is beyond the limit is what the sockets' buffers hold.
    assert server.sent < limit + 32 * 1024 * 1024


async def test_a_body_without_length_or_end_is_cut_off_at_the_limit(
    server: Server, client: Client
) -> None:
    server.routes["/x"] = raw(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (2 * 1024 * 1024))
    fault = await client.refused(server.url("/x"))
    assert fault.reason is Reason.MEDIA_TOO_LARGE


async def test_a_body_that_trickles_ends_at_the_time_limit(server: Server, client: Client) -> None:
    async def trickle(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    server.routes["/x"] = trickle
    fault = await client.refused(server.url("/x"), timeout=0.2)
    assert fault.reason is Reason.MEDIA_FETCH_TIMEOUT
    assert "0.2 s" in fault.message


async def test_a_host_that_never_answers_ends_at_the_time_limit(
    server: Server, client: Client
) -> None:
    server.routes["/x"] = raw(b"", close=False)
    fault = await client.refused(server.url("/x"), timeout=0.1)
    assert fault.reason is Reason.MEDIA_FETCH_TIMEOUT


async def test_a_silent_host_does_not_delay_another(server: Server, internet: Internet) -> None:
    client = Client(FetchLimits(connections_per_host=2), internet)
    internet.names |= {"slow.example": ["127.0.0.1"], "fast.example": ["127.0.0.1"]}
    server.routes["/slow"] = raw(b"", close=False)
    server.routes["/fast"] = fixed(BODY)
    slow = [
        asyncio.create_task(client.get(server.url("/slow", "slow.example"), timeout=60))
        for _ in range(20)
    ]
    await server.reached(connections=2)
    for _ in range(5):
        assert (await client.get(server.url("/fast", "fast.example"))).data == BODY
    assert not any(task.done() for task in slow)
    assert server.connections == 3
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    await client.fetcher.close()


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_a_packed_body_is_unpacked(
    server: Server, client: Client, encoding: str, pack: object
) -> None:
    assert callable(pack)
    server.routes["/x"] = fixed(pack(BODY * 1000), Content_Encoding=encoding)
    assert (await client.get(server.url("/x"))).data == BODY * 1000
    assert server.requests[0].headers["accept-encoding"] == "identity"


async def test_what_follows_a_packed_body_is_not_waited_for(server: Server, client: Client) -> None:
    async def endless(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(BODY))
        while True:
            writer.write(bytes(64 * 1024))
            await writer.drain()

    server.routes["/x"] = endless
    assert (await client.get(server.url("/x"), timeout=5.0)).data == BODY


async def test_an_age_of_thousands_of_digits_is_a_great_age(server: Server, client: Client) -> None:
    server.routes["/x"] = fixed(BODY, Age="9" * 5000)
    assert (await client.get(server.url("/x"))).age > 10**8


async def test_a_bomb_goes_off_at_the_limit(server: Server, client: Client) -> None:
    bomb = gzip.compress(bytes(64 * 1024 * 1024))
    assert len(bomb) < 100_000
    server.routes["/x"] = fixed(bomb, Content_Encoding="gzip")
    fault = await client.refused(server.url("/x"))
    assert fault.reason is Reason.MEDIA_TOO_LARGE


@pytest.mark.parametrize(
    ("body", "encoding"),
    [(b"not gzip", "gzip"), (gzip.compress(BODY)[:-4], "gzip"), (BODY, "br"), (BODY, "gzip, gzip")],
)
async def test_a_damaged_or_unknown_packing_is_a_failed_fetch(
    server: Server, client: Client, body: bytes, encoding: str
) -> None:
    server.routes["/x"] = fixed(body, Content_Encoding=encoding)
    fault = await client.refused(server.url("/x"))
    assert fault.reason is Reason.MEDIA_FETCH_FAILED


async def test_a_full_budget_stops_a_download(server: Server, client: Client) -> None:
    await client.budget.take(Amount(64 * 1024 * 1024 - 1000), index=0)
    server.routes["/x"] = fixed(bytes(5000))
    reservation = client.budget.open()
    with pytest.raises(Fault) as caught:
        await client.fetcher.fetch(
            parse(server.url("/x"), index=0),
            index=0,
            max_bytes=10_000,
            timeout=5,
            reservation=reservation,
        )
    assert caught.value.reason is Reason.MEDIA_BUDGET_FULL


async def test_an_unchanged_object_is_not_sent_again(server: Server, client: Client) -> None:
    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        fresh = request.headers.get("if-none-match") == '"v1"'
        await fixed(status="304 Not Modified" if fresh else "200 OK")(request, writer)

    server.routes["/x"] = answer
    response = await client.get(server.url("/x"), validators=Validators(etag='"v1"'))
    assert response.data is None


async def test_an_unasked_304_is_not_a_picture(server: Server, client: Client) -> None:
    server.routes["/x"] = fixed(status="304 Not Modified")
    assert (await client.refused(server.url("/x"))).reason is Reason.MEDIA_NOT_FOUND


async def test_a_host_without_tls_is_a_failed_fetch(client: Client) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 this is not TLS\r\n")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    fault = await client.refused(f"https://127.0.0.1:{port}/x")
    assert fault.reason is Reason.MEDIA_FETCH_FAILED
    listener.close()


async def test_proxies_of_the_environment_are_used_only_where_asked_for(
    server: Server, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url(""))
    server.routes["http://img.example/x"] = fixed(BODY)
    for use, expected in ((False, Reason.MEDIA_FETCH_FAILED), (True, None)):
        client = Client(FetchLimits(use_env_proxies=use), internet)
        try:
            response = await client.get("http://img.example/x")
            assert (expected, response.data) == (None, BODY)
        except Fault as fault:
            assert fault.reason is expected
        # A proxy does not lift what can be judged without it.
        fault = await client.refused("http://10.0.0.1/x")
        assert fault.reason is Reason.MEDIA_HOST_FORBIDDEN
        await client.fetcher.close()
    assert [request.target for request in server.requests] == ["http://img.example/x"]


async def test_a_silent_name_server_is_a_timeout_and_delays_nobody_else(
    server: Server, internet: Internet
) -> None:
    go = threading.Event()

    def lookup(host: str, port: int) -> Sequence[str]:
        if host == "silent.example":
            go.wait(30)
        return internet.lookup(host, port)

    internet.names |= {"silent.example": ["127.0.0.1"], "fast.example": ["127.0.0.1"]}
    resolver = OpenLoopback(allow_private=False, timeout=2, threads=4, lookup=lookup)
    fetcher = Fetcher(FetchLimits(retries=0), resolver)
    client = Client(FetchLimits(), internet)
    client.fetcher = fetcher
    server.routes["/x"] = fixed(BODY)
    silent = asyncio.create_task(client.refused(server.url("/x", "silent.example")))
    await asyncio.sleep(0)
    assert (await client.get(server.url("/x", "fast.example"))).data == BODY
    assert (await silent).reason is Reason.MEDIA_FETCH_TIMEOUT
    with pytest.raises(Fault) as caught:
        await fetcher.judge_addresses(parse("http://silent.example/", index=0), 0)
    assert caught.value.reason is Reason.MEDIA_FETCH_TIMEOUT
    go.set()
    await fetcher.close()
