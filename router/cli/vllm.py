"""`mmrouter vllm`: a real vLLM worker with the settings that the router builds on."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from router.cli.values import duration

if TYPE_CHECKING:
    from workers.vllm.options import WorkerOptions

BAD_ARGUMENTS = 2
FAILED = 1

_EPILOG = """\
What follows -- goes to `vllm serve` as it is. A flag given there wins over the
launcher's own.

Examples:
  mmrouter vllm /models/Qwen3-VL-8B-Instruct --listen 0.0.0.0:50051
  mmrouter vllm /models/Qwen3-VL-8B-Instruct --python /opt/vllm/bin/python \\
      --kv-events -- --max-model-len 32768 --limit-mm-per-prompt '{"image": 8}'
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "vllm",
        description="Runs a vLLM gRPC worker, says `listening on HOST:PORT` once it serves, and\n"
        "passes SIGTERM on.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="mmrouter vllm MODEL [FLAG…] [-- FLAG OF VLLM…]",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the model's folder")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:50051",
        metavar="HOST:PORT",
        help="address to serve on; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(sys.executable),
        metavar="PATH",
        help="the interpreter of the environment that has vLLM (default: this one)",
    )
    parser.add_argument(
        "--served-model-name", default="", metavar="NAME", help="default: the folder's name"
    )
    parser.add_argument(
        "--mm-processor",
        choices=("off", "inprocess", "redis"),
        default="inprocess",
        help="whether the worker takes media references, and who reads them (default: inprocess)",
    )
    parser.add_argument(
        "--redis-url", default="", metavar="URL", help="the sidecar's, for --mm-processor redis"
    )
    parser.add_argument(
        "--allowed-media-domains",
        type=_names,
        default=(),
        metavar="A,B",
        help="fetch media from these only (default: from anywhere)",
    )
    parser.add_argument(
        "--media-local-root", type=Path, metavar="DIR", help="read file: URLs below this folder"
    )
    parser.add_argument(
        "--kv-events",
        nargs="?",
        const="ipc",
        default="",
        metavar="ENDPOINT",
        help="publish KV events, as --policy prefix wants; ENDPOINT is the ZMQ socket between "
        "engine and servicer, tcp://*:PORT for a data-parallel engine (default: a Unix socket)",
    )
    parser.add_argument(
        "--pairing-protocol",
        default="",
        metavar="NAME",
        help="prefill and decode workers that name one pair only with the same",
    )
    for flag, default, what in (
        ("--start-timeout", "30m", "to load the model and warm up"),
        ("--stop-timeout", "30s", "to end after SIGTERM, before it is killed"),
    ):
        parser.add_argument(
            flag,
            type=duration,
            default=duration(default),
            metavar="TIME",
            help=f"time {what} (default: {default})",
        )
    parser.add_argument(
        "--print-command", action="store_true", help="print the vLLM command line and end"
    )
    _keep_apart_what_follows_dashes(parser)


def run(args: argparse.Namespace) -> int:
    from workers.vllm import versions
    from workers.vllm.command import command
    from workers.vllm.launch import LaunchFailed, launch
    from workers.vllm.options import OptionsError

    try:
        options = options_from(args)
        options.check()
    except OptionsError as error:
        return _fail(BAD_ARGUMENTS, str(error))
    if args.print_command:
        print(shlex.join(command(options)))
        return 0
    try:
        verdict = versions.judge(versions.installed(options.python), options.python)
    except versions.EnvironmentUnfit as error:
        return _fail(BAD_ARGUMENTS, str(error))
    for doubt in verdict.doubts:
        print(f"warning: {doubt}", file=sys.stderr)
    if verdict.problems:
        return _fail(FAILED, verdict.problems[0])
    try:
        asyncio.run(launch(options))
    except (LaunchFailed, OSError) as error:
        return _fail(FAILED, str(error))
    return 0


def options_from(args: argparse.Namespace) -> WorkerOptions:
    """The worker's options, free ports chosen. Raises OptionsError for a wrong address."""
    from workers.vllm.options import MmProcessor, OptionsError, WorkerOptions, kv_events_socket
    from workers.vllm.process import free_port

    host, colon, port = args.listen.rpartition(":")
    if not (colon and port.isdecimal() and int(port) < 65536):
        raise OptionsError(f"not an address: {args.listen!r} (write HOST:PORT)")
    number = int(port) or free_port()
    return WorkerOptions(
        model=args.model,
        python=args.python,
        host=host.strip("[]"),
        port=number,
        served_model_name=args.served_model_name,
        mm_processor=MmProcessor(args.mm_processor),
        redis_url=args.redis_url,
        kv_events=kv_events_socket(number) if args.kv_events == "ipc" else args.kv_events,
        allowed_media_domains=args.allowed_media_domains,
        media_local_root=args.media_local_root,
        pairing_protocol=args.pairing_protocol,
        start_timeout=args.start_timeout,
        stop_timeout=args.stop_timeout,
        extra=args.extra,
    )


def _keep_apart_what_follows_dashes(parser: argparse.ArgumentParser) -> None:
    # argparse has no argument that takes everything after -- and nothing before it.
    parse = parser.parse_known_args

    def split(args: Sequence[str], namespace: Any = None) -> tuple[Any, list[str]]:
        dashes = args.index("--") if "--" in args else len(args)
        parsed, unknown = parse(args[:dashes], namespace)
        parsed.extra = tuple(args[dashes + 1 :])
        return parsed, unknown

    parser.parse_known_args = split  # type: ignore[method-assign, assignment]


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _fail(code: int, message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
