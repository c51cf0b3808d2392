"""One command against one server: open the channel, act, and say plainly what went wrong."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from router.cli.connection import Connection, ConnectionFlagsError, connection
from router.units import format_duration

# Where gRPC carries the google.rpc.Status with the details of a failure.
_STATUS_DETAILS = "grpc-status-details-bin"


class CommandError(Exception):
    """The command cannot go on; the message is for the terminal."""


def call(args: argparse.Namespace, act: Callable[[grpc.aio.Channel], Awaitable[int]]) -> int:
    """Runs `act` on the channel that `args` describe; returns the exit code.

    A failure is one line on stderr and exit code 1; flags that contradict each
    other are exit code 2.
    """
    try:
        return asyncio.run(_act(connection(args), act))
    except ConnectionFlagsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except grpc.aio.AioRpcError as error:
        sys.stderr.write(f"error: {describe(error)}\n")
    except CommandError as error:
        sys.stderr.write(f"error: {error}\n")
    return 1


async def _act(server: Connection, act: Callable[[grpc.aio.Channel], Awaitable[int]]) -> int:
    async with server.open() as channel:
        return await act(channel)


def describe(error: grpc.aio.AioRpcError) -> str:
    """`REASON: message`, and when to try again where the server says so.

    The reason is `google.rpc.ErrorInfo`'s, or the status code's name from a
    server that sends none.
    """
    reason = error.code().name
    retry = ""
    for detail in _details(error):
        info = error_details_pb2.ErrorInfo()
        hint = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(hint):
            after = hint.retry_delay.seconds + hint.retry_delay.nanos / 1e9
            retry = f" (retry in {format_duration(after)})"
    return f"{reason}: {error.details()}{retry}"


def _details(error: grpc.aio.AioRpcError) -> Iterable[any_pb2.Any]:
    for key, value in error.trailing_metadata():
        if key == _STATUS_DETAILS and isinstance(value, bytes):
            try:
                details: Iterable[any_pb2.Any] = status_pb2.Status.FromString(value).details
            except DecodeError:  # the trailer is damaged; code and message still stand
                break
            return details
    return ()
