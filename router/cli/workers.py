"""`mmrouter workers`: look at a running router's fleet and change it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

import grpc
from google.protobuf.json_format import MessageToDict

from router.cli import table
from router.cli.call import call
from router.cli.connection import add_connection_flags, add_token_flag, authorization
from router.cli.values import duration
from router.wire import admin
from router.wire.router_pb2_grpc import RouterAdminStub

_ROLES = {
    "both": admin.WorkerRole.BOTH,
    "prefill": admin.WorkerRole.PREFILL,
    "decode": admin.WorkerRole.DECODE,
    "encode": admin.WorkerRole.ENCODE,
}
# Cursor home, and everything from there on erased.
_CLEAR = "\x1b[H\x1b[J"
_HEADER = (
    "ADDRESS",
    "STATE",
    "SINCE",
    "ROLE",
    "MODEL",
    "MEDIA",
    "IN FLIGHT",
    "RUNNING/WAITING",
    "LOAD AGE",
    "BREAKER",
    "REASON",
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("workers", description="Shows and changes a router's fleet.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    shared = argparse.ArgumentParser(add_help=False)
    add_connection_flags(shared)
    add_token_flag(shared)
    shared.add_argument("--timeout", type=duration, default=10.0, metavar="TIME")
    shared.add_argument("--json", action="store_true", help="print JSON")

    listing = actions.add_parser("list", parents=[shared], help="show all workers")
    listing.add_argument(
        "--watch",
        type=duration,
        nargs="?",
        const=2.0,
        metavar="TIME",
        help="show them again and again, this far apart (2s), until interrupted",
    )
    add = actions.add_parser("add", parents=[shared], help="register a worker")
    add.add_argument("--role", choices=_ROLES, default="both")
    add.add_argument("--label", type=_label, action="append", default=[], metavar="KEY=VALUE")
    drain = actions.add_parser(
        "drain", parents=[shared], help="let a worker's requests finish, then take it out"
    )
    remove = actions.add_parser(
        "remove", parents=[shared], help="take a worker out at once and cancel its requests"
    )
    for action in (add, drain, remove):
        action.add_argument("worker", metavar="HOST:PORT")


def run(args: argparse.Namespace) -> int:
    async def act(channel: grpc.aio.Channel) -> int:
        stub = RouterAdminStub(channel)
        watching = args.action == "list" and args.watch is not None
        # On a terminal each table takes the place of the one before.
        clear = _CLEAR if watching and sys.stdout.isatty() else ""
        while True:
            print(clear + _text(await _workers(stub, args), args), flush=True)
            if not watching:
                return 0
            await asyncio.sleep(args.watch)

    return call(args, act)


def _text(workers: Sequence[admin.Worker], args: argparse.Namespace) -> str:
    if args.json:
        listed = [MessageToDict(w, preserving_proto_field_name=True) for w in workers]
        return json.dumps(listed if args.action == "list" else listed[0], indent=2)
    if not workers:
        return "no workers"
    return table.render(_HEADER, [row(worker) for worker in workers])


async def _workers(stub: RouterAdminStub, args: argparse.Namespace) -> list[admin.Worker]:
    """The workers that the action shows: all of them, or the one it changed."""
    common = {"timeout": args.timeout, "metadata": authorization(args.token)}
    match args.action:
        case "list":
            return list((await stub.ListWorkers(admin.ListWorkersRequest(), **common)).workers)
        case "add":
            added = admin.AddWorkerRequest(
                address=args.worker, role=_ROLES[args.role], labels=dict(args.label)
            )
            return [(await stub.AddWorker(added, **common)).worker]
        case "drain":
            drained = admin.DrainWorkerRequest(address=args.worker)
            return [(await stub.DrainWorker(drained, **common)).worker]
        case _:
            removed = admin.RemoveWorkerRequest(address=args.worker)
            return [(await stub.RemoveWorker(removed, **common)).worker]


def row(worker: admin.Worker) -> tuple[str, ...]:
    """One worker's cells. What it has not reported stays empty, which is not zero."""
    load = worker.load
    reported = load.HasField("running") or load.HasField("waiting")
    queue = (
        f"{load.running if load.HasField('running') else '?'}"
        f"/{load.waiting if load.HasField('waiting') else '?'}"
    )
    return (
        worker.address,
        _enum_word(admin.WorkerState.Name(worker.state), "WORKER_STATE_UNSPECIFIED"),
        age(worker.seconds_in_state),
        _enum_word(admin.WorkerRole.Name(worker.role), "WORKER_ROLE_UNSPECIFIED"),
        worker.model,
        # A worker that takes no references gets tensors from the router.
        worker.capability.mm_processor or ("router" if worker.HasField("capability") else ""),
        str(load.in_flight),
        queue if reported else "",
        age(load.age_seconds) if load.HasField("age_seconds") else "",
        load.breaker,
        worker.reason,
    )


def age(seconds: float) -> str:
    """Seconds as a person reads them, in the two largest units: `0.4s`, `12s`, `3m05s`, `2h07m`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}h{minutes_left:02}m" if hours else f"{minutes}m{rest:02}s"


def _enum_word(name: str, unspecified: str) -> str:
    return "" if name == unspecified else name.lower()


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"not KEY=VALUE: {text!r}")
    return key, value
