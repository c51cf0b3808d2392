"""`mmrouter serve`: run the router."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from typing import Any

from router import config, heap

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

EPILOG = """\
Every flag --a-b but --config is also the variable MMROUTER_A_B and the key a_b
of the file. Flags win over variables, variables over the file. Write durations
as 250ms, 5s or 1m30s and sizes as 4096, 64MiB or 1GB. --worker and other flags
that take several values can be repeated, or given once with commas.
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "serve",
        help="run the router",
        usage="mmrouter serve [FLAG…]",
        description="Run the router in front of vLLM gRPC workers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="read settings from this TOML file")
    config.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP. 0: stopped, 1: could not start, 2: bad settings."""
    for number in STOPS:
        # Until the loop listens: as a container's first process one without a handler gets none.
        signal.signal(number, _stopped_early)
    try:
        settings = config.load(config.flags_of(arguments), arguments.config)
    except config.ConfigError as error:
        sys.stderr.write("".join(f"mmrouter serve: {line}\n" for line in str(error).splitlines()))
        return 2
    from router.observe import logging

    alone = settings.processes == 1
    if alone:
        heap.keep_freed_memory()
    logging.configure_server(settings.log_format, settings.log_level)
    _log = logging.get_logger("app")
    for name, nearest in config.unknown_variables(os.environ):
        # No error: what a cluster tells its pods may have our prefix by chance.
        _log.warning("unknown_variable", name=name, nearest=nearest or None)
    if not alone:
        return asyncio.run(_supervise(settings))
    import uvloop

    from router.cli.running import run_app

    return uvloop.run(run_app(settings))


async def _supervise(settings: config.Settings) -> int:
    from router.supervise.supervisor import CannotServe, serve

    try:
        await serve(settings)
    except CannotServe as error:
        sys.stderr.write(f"mmrouter serve: {error}\n")
        return 1
    return 0


def _stopped_early(*_: object) -> None:
    sys.exit(0)
