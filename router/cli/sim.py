"""`mmrouter sim`: one simulated worker in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from router.cli.values import duration

if TYPE_CHECKING:
    from workers.sim import SimOptions

T = TypeVar("T")

CANNOT_LISTEN = 1
BAD_ARGUMENTS = 2

_EPILOG = """\
Trouble: --fault [RPC:][COUNT*]DIRECTIVE[,DIRECTIVE…] may be repeated. The
directives are fail=STATUS, fail-after-chunks=N[:STATUS], hang,
hang-after-chunks=N, saturate, slow-first=TIME, end-without-complete,
constraint-failed, die and pushback=TIME. A single request asks for them with
the metadata key sim-fault, or with [[sim: fail-after-chunks=3]] in its prompt.

Examples:
  mmrouter sim --listen 127.0.0.1:50051
  mmrouter sim --time-per-output-token 20ms --prefill-rate 8000
  mmrouter sim --fault '3*fail=UNAVAILABLE' --fault 'GetServerInfo: 2*fail=UNAVAILABLE'
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sim",
        usage="mmrouter sim [FLAG…]",
        description="Runs a simulated vLLM worker. It speaks the whole gRPC contract, reads\n"
        "pictures for real, and answers with a sentence that says what has reached it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:50051",
        metavar="HOST:PORT",
        help="address to serve on; port 0 takes a free one (default: 127.0.0.1:50051)",
    )
    parser.add_argument(
        "--control",
        metavar="HOST:PORT",
        help="address of an HTTP endpoint to inspect and disturb the worker (default: none)",
    )
    parser.add_argument(
        "--grace",
        type=duration,
        default=0.0,
        metavar="TIME",
        help="time that open calls get to end when the worker stops (default: 0s)",
    )
    _add_model(parser.add_argument_group("model"))
    _add_media(parser.add_argument_group("media"))
    _add_speed(parser.add_argument_group("speed and capacity"))
    _add_cache(parser.add_argument_group("KV cache"))
    _add_pairing(parser.add_argument_group("prefill/decode pairing and transport"))
    _add_trouble(parser.add_argument_group("manners and trouble"))


def run(args: argparse.Namespace) -> int:
    try:
        options = options_from(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    try:
        asyncio.run(serve(options, args.listen, args.control, args.grace))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_LISTEN
    return 0


def options_from(args: argparse.Namespace) -> SimOptions:
    """The worker's options; what was not given keeps its default. ValueError for what is off."""
    from workers.sim import SimOptions

    given = {
        field.name: getattr(args, field.name)
        for field in fields(SimOptions)
        if getattr(args, field.name, None) is not None
    }
    given["faults"] = tuple(given.get("faults", ()))
    return SimOptions(**given)


async def serve(options: SimOptions, listen: str, control: str | None, grace: float) -> None:
    """Runs one worker until SIGTERM or SIGINT. OSError when it cannot listen."""
    from workers.sim import SimWorker
    from workers.sim.control import Control

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    worker = SimWorker(options)
    panel = Control(worker)
    try:
        address = await worker.start(listen)
        if control is not None:
            print(f"control on http://{await panel.start(control)}", file=sys.stderr, flush=True)
        if worker.bootstrap_address:
            print(f"bootstrap on http://{worker.bootstrap_address}", file=sys.stderr, flush=True)
        print(f"listening on {address}", flush=True)
        await stopped.wait()
    finally:
        await panel.stop()
        await worker.stop(grace)


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", metavar="NAME", help="model path (default: sim/Qwen3-VL)")
    group.add_argument(
        "--served-model", metavar="NAME", help="what clients ask for (default: the model path)"
    )
    group.add_argument(
        "--model-type",
        metavar="TYPE",
        help="qwen3_vl, qwen2_5_vl or qwen2_vl; any other is a text model (default: qwen3_vl)",
    )
    group.add_argument("--max-context", type=int, metavar="TOKENS", help="default: 262144")
    group.add_argument(
        "--min-pixels", type=int, metavar="N", help="smallest area of a resized picture"
    )
    group.add_argument(
        "--max-pixels", type=int, metavar="N", help="largest area of a resized picture"
    )


def _add_media(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mm-processor",
        type=lambda text: "" if text == "off" else text,
        metavar="NAME",
        help='what it advertises as media processor; "off" takes no references '
        "(default: inprocess)",
    )
    group.add_argument(
        "--mm-schemes",
        type=_list_of(str),
        metavar="LIST",
        help="URL schemes that it fetches (default: data,file,http,https)",
    )
    group.add_argument(
        "--device-normalize",
        action=argparse.BooleanOptionalAction,
        help="wants raw 0..255 pixels and normalises them itself (default: yes)",
    )
    group.add_argument("--encoder-dtype", metavar="DTYPE", help="default: bfloat16")
    group.add_argument(
        "--item-limits",
        type=_item_limits,
        metavar="LIST",
        help="items per prompt (default: image=16,video=2)",
    )
    group.add_argument(
        "--encoder-budget", type=int, metavar="TOKENS", help="most features of an item"
    )
    group.add_argument(
        "--local-root", type=Path, metavar="DIR", help="where file: references may point"
    )
    group.add_argument(
        "--media-timeout",
        type=duration,
        metavar="TIME",
        help="time for one fetch (default: 5s)",
    )


def _add_speed(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests that run at once (default: 64)"
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        metavar="N",
        help="requests that may wait before the next is refused (default: as many as may run)",
    )
    group.add_argument(
        "--prefill-rate",
        type=float,
        metavar="N",
        help="prompt tokens a second, shared by all requests (default: no time at all)",
    )
    group.add_argument("--time-per-output-token", type=duration, metavar="TIME", help="default: 0s")
    group.add_argument("--tokens-per-chunk", type=int, metavar="N", help="default: 1")


def _add_cache(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--block-size", type=int, metavar="TOKENS", help="default: 16")
    group.add_argument("--kv-blocks", type=int, metavar="N", help="default: 65536")
    group.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction)
    group.add_argument(
        "--kv-events",
        action=argparse.BooleanOptionalAction,
        help="whether SubscribeKvEvents is served (default: yes)",
    )
    group.add_argument(
        "--heartbeat",
        type=duration,
        metavar="TIME",
        help="time between load records (default: 1s)",
    )
    group.add_argument("--encoder-cache-items", type=int, metavar="N", help="default: 1024")


def _add_pairing(group: argparse._ArgumentGroup) -> None:
    for flag, value in (
        ("--kv-role", "NAME"),
        ("--kv-connector", "NAME"),
        ("--kv-engine-id", "ID"),
        ("--kv-cache-dtype", "DTYPE"),
        ("--attention-backend", "NAME"),
        ("--model-dtype", "DTYPE"),
        ("--pairing-protocol", "NAME"),
        ("--shm-namespace-id", "ID"),
    ):
        group.add_argument(flag, metavar=value, help="reported by GetServerInfo")
    group.add_argument(
        "--bootstrap",
        metavar="HOST:PORT",
        help="where decode workers fetch from this one, with MooncakeConnector; port 0 takes a "
        "free one (default: none)",
    )
    group.add_argument(
        "--transfer-timeout",
        type=duration,
        metavar="TIME",
        help="longest wait for a prefill worker's transfer (default: 30s)",
    )
    group.add_argument(
        "--media-identity",
        action=argparse.BooleanOptionalAction,
        help="whether a prefill of references says what they were (default: yes)",
    )
    group.add_argument(
        "--gullible",
        action=argparse.BooleanOptionalAction,
        help="decodes whatever was handed over, as real workers do, instead of failing when it "
        "is another request's (default: no)",
    )


def _add_trouble(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--style",
        choices=("python", "rust"),
        help="whose counts and Completes its streams have (default: python)",
    )
    group.add_argument(
        "--warmup",
        type=duration,
        metavar="TIME",
        help="time of NOT_SERVING after the port opened (default: 0s)",
    )
    group.add_argument(
        "--mortal",
        action=argparse.BooleanOptionalAction,
        help="malformed tensors kill the engine for good, as in a real worker (default: yes)",
    )
    group.add_argument(
        "--fault",
        action="append",
        dest="faults",
        metavar="RULE",
        help="what goes wrong with which calls; see below",
    )
    group.add_argument(
        "--record-requests",
        type=int,
        metavar="N",
        help="last requests that --control shows (default: 100)",
    )


def _list_of(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parse(text: str) -> tuple[T, ...]:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())

    return parse


def _item_limits(text: str) -> tuple[tuple[str, int], ...]:
    """`image=8,video=2`; ValueError for anything else."""
    limits = []
    for part in _list_of(str)(text):
        name, _, limit = part.partition("=")
        limits.append((name.strip(), int(limit)))
    return tuple(limits)
