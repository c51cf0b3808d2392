"""`mmrouter health`: one probe of the standard gRPC health service.

Exit codes are those of grpc_health_probe: 0 serving, 1 bad arguments, 2 could
not connect in time, 3 the call failed or timed out, 4 not serving.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import grpc
from grpc_health.v1 import health_pb2

from router.cli.connection import Connection, ConnectionFlagsError, add_connection_flags, connection
from router.cli.values import duration
from router.units import format_duration

SERVING = 0
BAD_ARGUMENTS = 1
NOT_CONNECTED = 2
CALL_FAILED = 3
NOT_SERVING = 4


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "health",
        description="Probes a server's gRPC health service once.",
        epilog="Exit codes: 0 serving, 1 bad arguments, 2 could not connect in time, "
        "3 the call failed or timed out, 4 not serving.",
    )
    add_connection_flags(parser)
    parser.add_argument("--service", default="", metavar="NAME", help="default: the whole server")
    for flag, what in (("--connect-timeout", "to connect"), ("--rpc-timeout", "for the answer")):
        parser.add_argument(
            flag,
            type=duration,
            default=1.0,
            metavar="TIME",
            help=f"time {what} (default: 1s)",
        )


def run(args: argparse.Namespace) -> int:
    try:
        server = connection(args)
    except ConnectionFlagsError as error:
        return _say(BAD_ARGUMENTS, f"error: {error}")
    return asyncio.run(probe(server, args.service, args.connect_timeout, args.rpc_timeout))


async def probe(
    server: Connection, service: str, connect_timeout: float, rpc_timeout: float
) -> int:
    """Checks `service` ("" is the whole server), says the result and returns the exit code.

    Timeouts are in seconds.
    """
    # Not the blocking client: that one polls a channel's state every 200 ms.
    async with server.open() as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), connect_timeout)
        except TimeoutError:
            limit = format_duration(connect_timeout)
            return _say(NOT_CONNECTED, f"error: could not connect within {limit}")
        return await _check(channel, service, rpc_timeout)


async def _check(channel: grpc.aio.Channel, service: str, rpc_timeout: float) -> int:
    # The generated stub would import the servicer's machinery as well.
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        response = await check(health_pb2.HealthCheckRequest(service=service), timeout=rpc_timeout)
    except grpc.aio.AioRpcError as error:
        return _say(CALL_FAILED, f"error: {_explain(error, service, rpc_timeout)}")
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return _say(SERVING if status == "SERVING" else NOT_SERVING, f"status: {status}")


def _explain(error: grpc.aio.AioRpcError, service: str, rpc_timeout: float) -> str:
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer within {format_duration(rpc_timeout)}"
        case grpc.StatusCode.UNIMPLEMENTED:
            return "the server has no gRPC health service"
        case grpc.StatusCode.NOT_FOUND:
            return f"the server knows no service {service!r}"
        case code:
            return f"the health check failed with {code.name}: {error.details()}"


def _say(code: int, line: str) -> int:
    print(line, file=sys.stdout if code == SERVING else sys.stderr)
    return code
