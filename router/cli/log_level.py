"""`mmrouter log-level`: show or change what a running router logs."""

from __future__ import annotations

import argparse

import grpc

from router.cli.call import call
from router.cli.connection import add_connection_flags, add_token_flag, authorization
from router.cli.values import duration
from router.wire import admin
from router.wire.router_pb2_grpc import RouterAdminStub

_LEVELS = ("debug", "info", "warning", "error")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "log-level",
        description="Shows the least level that a router logs, or changes it until it restarts.",
    )
    parser.add_argument("level", nargs="?", choices=_LEVELS, help="log from this level on")
    add_connection_flags(parser)
    add_token_flag(parser)
    parser.add_argument("--timeout", type=duration, default=10.0, metavar="TIME")


def run(args: argparse.Namespace) -> int:
    async def act(channel: grpc.aio.Channel) -> int:
        wanted = (args.level or "log_level_unspecified").upper()
        answer = await RouterAdminStub(channel).SetLogLevel(
            admin.SetLogLevelRequest(level=wanted),
            timeout=args.timeout,
            metadata=authorization(args.token),
        )
        level, before = (_word(value) for value in (answer.level, answer.before))
        print(level if level == before else f"{level} (was {before})")
        return 0

    return call(args, act)


def _word(level: admin.LogLevel) -> str:
    return admin.LogLevel.Name(level).lower()
