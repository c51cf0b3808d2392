"""Sizes of pictures of which only the beginning is fetched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.media.fetch import Fetcher
from router.media.limits import FetchLimits
from router.media.resolve import PublicResolver
from router.media.signed import object_name
from router.media.sizes import Size, SizeLimits, Sizes
from router.media.url import parse
from tests.fleet.stand_in import Clock
from tests.media.images import read
from tests.media.server import Answer, Request, Server, fixed, redirect, running

LIMITS = SizeLimits(entries=3, patience=20.0, retry_after=60.0)


def ranges(body: bytes) -> Answer:
    """A host that gives the part that was asked for."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        last = int(request.headers["range"].removeprefix("bytes=0-"))
        await fixed(body[: last + 1], status="206 Partial Content")(request, writer)

    return answer


async def silence(request: Request, writer: asyncio.StreamWriter) -> None:
    """A host that takes the request and says nothing."""
    await asyncio.Event().wait()


def late_jpeg(width: int, height: int, before: int) -> bytes:
    """A JPEG whose size stands behind so many bytes of application data."""
    head = bytearray(b"\xff\xd8")
    while before > 0:
        filler = min(before, 60_000)
        head += b"\xff\xef" + (filler + 2).to_bytes(2, "big") + bytes(filler)
        before -= filler
    head += b"\xff\xc0\x00\x11\x08" + height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(head + b"\x03\x01\x11\x00\x02\x11\x01\x03\x11\x01")


def test_the_name_of_a_long_reference_is_short_and_its_own() -> None:
    names = {
        object_name(parse(f"https://a.example/{'x' * 16_000}{last}{signed}", index=0))
        for last in "ab"
        for signed in ("", "?sig=1", "?sig=2")
    }
    assert len(names) == 2
    assert max(map(len, names)) < 600


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running() as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def sizes(clock: Clock) -> AsyncIterator[Sizes]:
    async with fetching(allow_private=True) as fetcher:
        sizes = Sizes(fetcher, LIMITS, clock=clock)
        yield sizes
        await sizes.close()


class fetching:
    def __init__(self, *, allow_private: bool) -> None:
        resolver = PublicResolver(allow_private=allow_private, timeout=5.0)
        self._fetcher = Fetcher(FetchLimits(allow_private_hosts=allow_private), resolver)

    async def __aenter__(self) -> Fetcher:
        return self._fetcher

    async def __aexit__(self, *_: object) -> None:
        await self._fetcher.close()


async def size(sizes: Sizes, url: str) -> Size | None:
    return await sizes.get(parse(url, index=0), index=0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("photo_640x480.jpg", (640, 480)),
        ("exif_6_24x16.jpg", (16, 24)),
        ("palette_203x151.png", (203, 151)),
        ("animated_203x151.gif", (203, 151)),
        ("photo_1008x1344.webp", (1008, 1344)),
    ],
)
async def test_the_first_kilobytes_tell_the_upright_size(
    server: Server, sizes: Sizes, name: str, expected: Size
) -> None:
    server.routes["/x"] = ranges(read(name))
    assert await size(sizes, server.url("/x")) == expected
    (request,) = server.requests
    assert request.headers["range"] == "bytes=0-4095"


async def test_more_is_asked_for_once_where_the_size_comes_late(
    server: Server, sizes: Sizes
) -> None:
    server.routes["/x"] = ranges(late_jpeg(5000, 3000, before=30_000))
    assert await size(sizes, server.url("/x")) == (5000, 3000)
    assert [r.headers["range"] for r in server.requests] == ["bytes=0-4095", "bytes=0-65535"]
    server.routes["/y"] = ranges(late_jpeg(5000, 3000, before=100_000))
    assert await size(sizes, server.url("/y")) is None
    assert len(server.requests) == 4


async def test_a_host_without_ranges_is_left_after_the_beginning(
    server: Server, sizes: Sizes
) -> None:
    body = read("photo_640x480.jpg") + bytes(8 << 20)
    server.routes["/x"] = fixed(body)
    assert await size(sizes, server.url("/x")) == (640, 480)


async def test_redirects_are_followed(server: Server, sizes: Sizes) -> None:
    server.routes["/x"] = redirect("/y")
    server.routes["/y"] = ranges(read("photo_640x480.jpg"))
    assert await size(sizes, server.url("/x")) == (640, 480)


async def test_a_private_host_is_not_asked(server: Server, clock: Clock) -> None:
    async with fetching(allow_private=False) as fetcher:
        sizes = Sizes(fetcher, LIMITS, clock=clock)
        assert await size(sizes, server.url("/x")) is None
        assert server.connections == 0


@pytest.mark.parametrize(
    "answer",
    [
        fixed(b"no picture"),
        fixed(b""),
        fixed(status="404 Not Found"),
        fixed(status="503 Unavailable"),
    ],
)
async def test_what_does_not_tell_is_not_asked_again_for_a_while(
    server: Server, sizes: Sizes, clock: Clock, answer: Answer
) -> None:
    server.routes["/x"] = answer
    for _ in range(3):
        assert await size(sizes, server.url("/x")) is None
    assert len(server.requests) == 1
    clock.advance(61)
    server.routes["/x"] = ranges(read("photo_640x480.jpg"))
    assert await size(sizes, server.url("/x")) == (640, 480)


async def test_a_host_that_says_nothing_is_waited_for_no_longer_than_that(
    server: Server, clock: Clock
) -> None:
    server.routes["/x"] = silence
    async with fetching(allow_private=True) as fetcher:
        sizes = Sizes(fetcher, SizeLimits(patience=1.5), clock=clock)
        for _ in range(2):
            assert await size(sizes, server.url("/x")) is None
    assert len(server.requests) == 1


async def test_several_who_ask_at_once_ask_once_and_a_signature_makes_no_difference(
    server: Server, sizes: Sizes
) -> None:
    server.routes["/x"] = ranges(read("photo_640x480.jpg"))
    urls = [server.url(f"/x?Expires={n}&Signature={n}") for n in range(5)]
    found = await asyncio.gather(*(size(sizes, url) for url in urls))
    assert found == [(640, 480)] * 5
    assert await size(sizes, urls[0]) == (640, 480)
    assert len(server.requests) == 1


async def test_the_least_recently_used_go(server: Server, sizes: Sizes) -> None:
    server.routes["/x"] = ranges(read("photo_640x480.jpg"))
    for target in ("/x?1", "/x?2", "/x?3", "/x?1", "/x?4"):
        await size(sizes, server.url(target))
    assert len(sizes) == 3
    asked = len(server.requests)
    await size(sizes, server.url("/x?1"))
    assert len(server.requests) == asked
    await size(sizes, server.url("/x?2"))
    assert len(server.requests) == asked + 1


async def test_one_who_leaves_harms_nobody(server: Server, sizes: Sizes) -> None:
    server.routes["/x"] = ranges(read("photo_640x480.jpg"))
    first = asyncio.create_task(size(sizes, server.url("/x")))
    second = asyncio.create_task(size(sizes, server.url("/x")))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == (640, 480)
