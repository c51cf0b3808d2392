"""`mmrouter generate`: one chat turn, printed as it streams."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field

import grpc
from tokenizers import Tokenizer

from router.cli.call import call
from router.cli.connection import authorization
from router.cli.detokenize import TextStream
from router.cli.prompt import (
    ServedModel,
    add_prompt_arguments,
    generate_request,
    served_model,
)
from router.wire import engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub

# The router's trailing metadata that say where a request went.
_ROUTE_PREFIX = "mmrouter-"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "generate",
        description="Applies the model's chat template to a prompt with pictures, sends it "
        "and prints the answer as it streams.",
    )
    add_prompt_arguments(parser)
    parser.add_argument("--no-stream", action="store_true", help="ask for the answer in one piece")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    async def generate(channel: grpc.aio.Channel) -> int:
        model = await served_model(channel, args)
        request = generate_request(args, model)
        request.stream = not args.no_stream
        # Several choices interleave, so they are printed one after the other at the end.
        live = not args.json and args.n == 1
        answer = await _receive(channel, request, model, args, live=live)
        if args.json:
            print(json.dumps(answer.as_json(request, model), ensure_ascii=False))
        elif not live:
            for index, choice in sorted(answer.choices.items()):
                print(f"[{index}] {choice.text}")
        return 0

    return call(args, generate)


@dataclass
class Choice:
    """One of the n answers, as far as it has come."""

    stream: TextStream
    text: str = ""
    complete: engine.GenerateComplete = field(default_factory=engine.GenerateComplete)

    def take(self, response: engine.GenerateResponse) -> str:
        """Adds a response of this choice; returns the new text."""
        if response.HasField("chunk"):
            new = self.stream.push(response.chunk.token_ids)
        else:
            self.complete = response.complete
            # After chunks, a Complete repeats ids that were already counted.
            new = "" if self.stream.ids else self.stream.push(self.complete.output_ids)
            new += self.stream.finish()
        self.text += new
        return new


@dataclass
class Answer:
    """All choices, and where the router sent the request."""

    tokenizer: Tokenizer
    choices: dict[int, Choice] = field(default_factory=dict)
    route: dict[str, str] = field(default_factory=dict)

    def take(self, response: engine.GenerateResponse) -> str:
        """Adds a response; returns the new text of its choice."""
        index = (response.chunk if response.HasField("chunk") else response.complete).index
        if index not in self.choices:
            self.choices[index] = Choice(TextStream(self.tokenizer))
        return self.choices[index].take(response)

    def as_json(self, request: engine.GenerateRequest, model: ServedModel) -> dict[str, object]:
        """The first choice at the top; `choices` has all of them when there are several."""
        choices = [
            {
                "text": choice.text,
                "ids": choice.stream.ids,
                "finish_reason": choice.complete.finish_reason,
            }
            for _, choice in sorted(self.choices.items())
        ]
        completes = [choice.complete for choice in self.choices.values()]
        document: dict[str, object] = {
            "request_id": request.request_id,
            "model": request.router.model or model.name,
            **(choices[0] if choices else {}),
            "usage": {
                "prompt_tokens": max((c.prompt_tokens for c in completes), default=0),
                "cached_tokens": max((c.cached_tokens for c in completes), default=0),
                "completion_tokens": sum(len(c.stream.ids) for c in self.choices.values()),
            },
            "route": self.route,
        }
        if len(choices) > 1:
            document["choices"] = choices
        return document


async def _receive(
    channel: grpc.aio.Channel,
    request: engine.GenerateRequest,
    model: ServedModel,
    args: argparse.Namespace,
    *,
    live: bool,
) -> Answer:
    """Reads the whole answer; with `live`, prints text as soon as it is whole characters."""
    answer = Answer(model.tokenizer)
    responses = VllmEngineStub(channel).Generate(
        request, timeout=args.timeout, metadata=authorization(args.token)
    )
    try:
        async for response in responses:
            text = answer.take(response)
            if live:
                sys.stdout.write(text)
                sys.stdout.flush()
    finally:
        if live and answer.choices:  # an error line too begins on a line of its own
            print(flush=True)
    for key, value in await responses.trailing_metadata():
        if key.startswith(_ROUTE_PREFIX):
            answer.route[key.removeprefix(_ROUTE_PREFIX)] = str(value)
    return answer
