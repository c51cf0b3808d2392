"""Calls whose answers cannot be read fail, as any other call that goes wrong.

grpc.aio gives None for such an answer, which its caller would take for the
message itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

Read = Callable[[bytes], Any]


class CheckedChannel:
    """What a generated stub needs of a channel: `VllmEngineStub(CheckedChannel(channel))`.

    Its calls raise `grpc.aio.AioRpcError` INTERNAL where an answer is no
    message of its type.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel: Any = channel

    def unary_unary(
        self, method: str, *, response_deserializer: Read, **options: Any
    ) -> Callable[..., Awaitable[Any]]:
        """As that of a channel."""
        ask = self._channel.unary_unary(method, **options)

        async def call(*request: Any, **settings: Any) -> Any:
            return _read(response_deserializer, await ask(*request, **settings))

        return call

    def unary_stream(
        self, method: str, *, response_deserializer: Read, **options: Any
    ) -> Callable[..., CheckedStream]:
        """As that of a channel."""
        ask = self._channel.unary_stream(method, **options)

        def call(*request: Any, **settings: Any) -> CheckedStream:
            return CheckedStream(ask(*request, **settings), response_deserializer)

        return call


class CheckedStream:
    """A running call that streams its answer."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, bytes], read: Read) -> None:
        self._call = call
        self._read = read

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in self._call:
            yield _read(self._read, message)

    def cancel(self) -> bool:
        """Ends the call."""
        return bool(self._call.cancel())


def _read(read: Read, message: bytes) -> Any:
    try:
        return read(message)
    except DecodeError:
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            details="the answer is not a message of its type",
        ) from None
