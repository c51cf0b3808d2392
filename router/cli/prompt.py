"""What `generate` and `explain` share: the arguments that describe a request, and the request."""

from __future__ import annotations

import argparse
import uuid
from dataclasses import dataclass

import grpc
from tokenizers import Tokenizer

from router.cli.call import CommandError
from router.cli.chat import ChatTemplate, ChatTemplateError
from router.cli.connection import add_connection_flags, add_token_flag, authorization
from router.cli.media import AttachAction, media_ref
from router.cli.values import duration
from router.fleet.bundle import BundleError, TokenizerBundle, read_bundle
from router.wire import common, engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub

_PROCESSING = {
    None: engine.MmProcessing.UNSPECIFIED,
    "auto": engine.MmProcessing.AUTO,
    "router": engine.MmProcessing.ROUTER,
    "worker": engine.MmProcessing.WORKER,
}


@dataclass(frozen=True)
class ServedModel:
    """The model behind an address: its name, how to write its prompts and read its ids."""

    name: str
    tokenizer: Tokenizer
    chat: ChatTemplate


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to, the prompt, its media, and the options for sampling and routing."""
    add_connection_flags(parser)
    add_token_flag(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="what the user says")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--timeout", type=duration, default=60.0, metavar="TIME")

    media = parser.add_argument_group("media, before the text, in the order given")
    for kind in ("image", "video"):
        media.add_argument(
            f"--{kind}",
            dest="media",
            action=AttachAction,
            const=kind,
            default=[],
            metavar="FILE|URL",
            help="a local file or an http(s):, data: or file: URL; may be repeated",
        )
    media.add_argument(
        "--inline", action="store_true", help="send local files as plain bytes, not data: URLs"
    )
    media.add_argument(
        "--max-long-side", type=int, metavar="PIXELS", help="shrink pictures to this longer side"
    )
    media.add_argument("--fps", type=float, metavar="N", help="frames a second from videos")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256, metavar="N")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--seed", type=int, metavar="N")
    sampling.add_argument("--n", type=int, default=1, metavar="N", help="choices to generate")

    routing = parser.add_argument_group("routing")
    routing.add_argument("--model", default="", help="needed when several are served")
    routing.add_argument(
        "--mm-processing",
        choices=[name for name in _PROCESSING if name],
        help="where media become tensors, if the router honours it",
    )
    routing.add_argument(
        "--routing-key", default="", metavar="KEY", help="equal keys go to the same worker"
    )


async def served_model(channel: grpc.aio.Channel, args: argparse.Namespace) -> ServedModel:
    """Asks the server for its model's name and files. Raises CommandError and AioRpcError."""
    stub = VllmEngineStub(channel)
    metadata = authorization(args.token)
    if args.model:  # the two requests have no field for it
        metadata += (("x-model", args.model),)
    info = await stub.GetModelInfo(
        engine.GetModelInfoRequest(), timeout=args.timeout, metadata=metadata
    )
    chunks = stub.GetTokenizer(
        common.GetTokenizerRequest(), timeout=args.timeout, metadata=metadata
    )
    try:
        bundle = await read_bundle(chunks)
        chat = ChatTemplate.from_files(bundle.files)
    except (BundleError, ChatTemplateError) as error:
        raise CommandError(str(error)) from error
    return ServedModel(info.served_model_name or info.model_path, _tokenizer(bundle), chat)


def generate_request(args: argparse.Namespace, model: ServedModel) -> engine.GenerateRequest:
    """The request that the arguments describe: one unexpanded anchor for each picture.

    Raises CommandError.
    """
    try:
        text = model.chat.render_turn(args.prompt, [item.kind for item in args.media], args.system)
    except ChatTemplateError as error:
        raise CommandError(str(error)) from error
    # The template has written the special tokens; the tokenizer must not add its own.
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    try:
        request = engine.GenerateRequest(
            request_id=f"cli-{uuid.uuid4().hex}",
            tokenized=engine.TokenizedInput(original_text=text, input_ids=ids),
            sampling_params=engine.SamplingParams(
                max_tokens=args.max_tokens,
                temperature=args.temperature,
                seed=args.seed,
                n=args.n,
                skip_special_tokens=True,
            ),
            router=engine.RouterOptions(
                model=args.model,
                mm_processing=_PROCESSING[args.mm_processing],
                routing_key=args.routing_key,
            ),
        )
        if args.media:
            hints = {"image": _image_hints(args), "video": _video_hints(args)}
            request.media_refs.items.extend(
                media_ref(item, hints[item.kind], inline=args.inline) for item in args.media
            )
    except ValueError as error:  # a number that does not fit its field
        raise CommandError(str(error)) from error
    return request


def _image_hints(args: argparse.Namespace) -> engine.MediaHints | None:
    if args.max_long_side is None:
        return None
    return engine.MediaHints(max_long_side_pixels=args.max_long_side)


def _video_hints(args: argparse.Namespace) -> engine.MediaHints | None:
    if args.max_long_side is None and args.fps is None:
        return None
    return engine.MediaHints(max_long_side_pixels=args.max_long_side, fps=args.fps)


def _tokenizer(bundle: TokenizerBundle) -> Tokenizer:
    if "tokenizer.json" not in bundle.files:
        raise CommandError("the server's tokenizer bundle has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(bundle.files["tokenizer.json"].decode())
    except Exception as error:  # the library raises plain Exception
        raise CommandError(f"the server's tokenizer.json cannot be used: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
