"""`mmrouter explain`: what the router would do with a prompt, without doing it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace

import grpc
from google.protobuf.json_format import MessageToDict

from router.cli import table
from router.cli.call import call
from router.cli.connection import add_token_flag, authorization, connection
from router.cli.prompt import add_prompt_arguments, generate_request, served_model
from router.wire import admin
from router.wire.router_pb2_grpc import RouterAdminStub

_ITEM_HEADER = ("ITEM", "KIND", "SOURCE", "SIZE", "TOKENS", "FORWARDABLE")
_WORKER_HEADER = ("WORKER", "ADMITTED", "IN FLIGHT", "COST", "CACHED", "CAUSE")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "explain",
        description="Asks the router for its plan for a prompt: where media would become "
        "tensors and why, what a worker must satisfy, and who would be picked. "
        "Nothing is sent to a worker.",
    )
    add_prompt_arguments(parser)
    parser.add_argument(
        "--admin-addr",
        metavar="HOST:PORT",
        help="where RouterAdmin listens, when not at --addr",
    )
    add_token_flag(
        parser,
        "--admin-token-file",
        "admin_token",
        "send RouterAdmin the bearer token in this file, when it is not that of --token-file",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    async def explain(channel: grpc.aio.Channel) -> int:
        model = await served_model(channel, args)
        request = admin.ExplainRequest(request=generate_request(args, model))
        admin_server = connection(args, args.admin_addr or args.addr)
        if args.admin_addr and args.admin_addr.startswith("unix:"):
            # Never with TLS there, whatever the other listener has.
            admin_server = replace(admin_server, credentials=None)
        async with admin_server.open() as admin_channel:
            stub = RouterAdminStub(admin_channel)
            explained = await stub.Explain(
                request,
                timeout=args.timeout,
                metadata=authorization(args.admin_token or args.token),
            )
        if args.json:
            print(json.dumps(MessageToDict(explained, preserving_proto_field_name=True), indent=2))
        else:
            print("\n".join(lines(explained)))
        return 0

    return call(args, explain)


def lines(explained: admin.ExplainResponse) -> Iterator[str]:
    """The explanation for a person."""
    yield f"model     {explained.model}"
    yield f"media in  {explained.mode} ({explained.reason})"
    estimate = explained.estimated_tokens
    expanded = f", about {estimate} with media expanded" if explained.items else ""
    yield f"prompt    {explained.prompt_tokens} tokens{expanded}"
    yield f"policy    {explained.policy}"
    yield f"prefixes  {explained.prefixes}"
    yield f"picked    {explained.picked or 'nobody is admissible'}"
    if explained.items:
        yield "\n" + table.render(_ITEM_HEADER, [_item(item) for item in explained.items])
    if explained.constraint:
        yield "\na worker must satisfy:"
        yield from (f"  {condition}" for condition in explained.constraint)
    if explained.workers:
        yield "\n" + table.render(_WORKER_HEADER, [_worker(worker) for worker in explained.workers])


def _item(item: admin.ExplainedItem) -> tuple[str, ...]:
    return (
        str(item.index),
        item.modality,
        item.source,
        f"{item.width}x{item.height}" if item.width else "",
        str(item.tokens) if item.tokens else "",
        "yes" if item.forwardable else f"no: {item.why_not}",
    )


def _worker(worker: admin.ExplainedWorker) -> tuple[str, ...]:
    admitted = "yes" if worker.admitted else "no"
    cost = f"{worker.cost:.3f}s" if worker.HasField("cost") else ""
    cached = _blocks(worker.matched_blocks) if worker.HasField("matched_blocks") else ""
    return (worker.address, admitted, str(worker.load.in_flight), cost, cached, worker.cause)


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"
