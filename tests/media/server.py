"""A loopback web server whose answers a test writes itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Request:
    """The head of one request."""

    method: str
    target: str
    headers: dict[str, str]


@dataclass
class Server:
    """Counts connections and requests; answers with what `routes` says for the path."""

    port: int = 0
    connections: int = 0
    requests: list[Request] = field(default_factory=list)
    sent: int = 0
    routes: dict[str, Answer] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        """The absolute URL of a path here."""
        return f"http://{host}:{self.port}{path}"

    async def reached(self, *, connections: int = 0, requests: int = 0) -> None:
        """Waits until so many have come in."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(
                lambda: self.connections >= connections and len(self.requests) >= requests
            )

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request after the other."""
        self.connections += 1
        await self._tell()
        try:
            while line := await reader.readline():
                method, target, _ = line.decode("latin-1").split(" ", 2)
                headers = {}
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode("latin-1").partition(":")
                    headers[name.lower()] = value.strip()
                request = Request(method, target, headers)
                self.requests.append(request)
                await self._tell()
                await self.routes[target.partition("?")[0]](request, writer)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()


def fixed(body: bytes = b"", *, status: str = "200 OK", **headers: str) -> Answer:
    """An ordinary answer with a right Content-Length; `a_b` in a name is written `a-b`."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    return answer


def redirect(location: str) -> Answer:
    """302 to `location`."""
    return fixed(status="302 Found", Location=location)


def raw(data: bytes, *, close: bool = True) -> Answer:
    """Exactly these bytes, then the end of the connection."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if close:
            writer.close()

    return answer


@asynccontextmanager
async def running() -> AsyncIterator[Server]:
    """A server on a free loopback port; its connections end with it."""
    server = Server()
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(server.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
