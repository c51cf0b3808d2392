"""What is told of those who do not speak HTTP, and of those who do."""

from __future__ import annotations

import asyncio
import io
import json

import aiohttp
import pytest
from aiohttp import web

from router.observe.http import HttpListener

GARBAGE = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03SECRET\r\n\r\n",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nSECRET\r\n\r\n",
    "long": b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
}


class Listener(HttpListener):
    def routes(self) -> list[web.RouteDef]:
        return [web.get("/broken", self._break)]

    async def _break(self, _: web.Request) -> web.Response:
        raise RuntimeError("our own mistake")


def lines(logged: io.StringIO) -> list[dict[str, str]]:
    return [json.loads(line) for line in logged.getvalue().splitlines()]


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_is_no_more_than_a_line_without_a_traceback(
    logged: io.StringIO, garbage: bytes
) -> None:
    listener = Listener()
    await listener.start("127.0.0.1:0")
    try:
        host, port = listener.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        assert b" 400 " in await reader.readline()
        writer.close()
    finally:
        await listener.stop()
    # Of what looks like TLS nothing is told at all.
    told = [(line["event"], line["level"]) for line in lines(logged)]
    assert told == [("http_garbage", "debug")] * (not garbage.startswith(b"\x16"))
    assert "Traceback" not in logged.getvalue()
    assert "SECRET" not in logged.getvalue()


async def test_a_mistake_of_our_own_keeps_its_traceback(logged: io.StringIO) -> None:
    listener = Listener()
    await listener.start("127.0.0.1:0")
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{listener.address}/broken") as answer,
        ):
            assert answer.status == 500
    finally:
        await listener.stop()
    (told,) = lines(logged)
    assert told["level"] == "error"
    assert "our own mistake" in told["exception"]
