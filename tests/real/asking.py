"""Asking a worker, or a router as if it were one, and what it answers."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import grpc
from google.rpc import error_details_pb2, status_pb2
from tokenizers import Tokenizer

from router.wire import common, engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from tests.real.stack import MODEL

IMAGES = Path(__file__).parents[1] / "data" / "images"
VIDEOS = Path(__file__).parents[1] / "data" / "video"
LIMITS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
# Longer than anything takes here, so that what hangs fails.
DEADLINE = 120.0

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


@dataclass
class Choice:
    """One completion."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


@dataclass
class Answer:
    """A Generate that ended well. `trailers` are the router's, or empty."""

    choices: dict[int, Choice]
    prompt_tokens: int
    cached_tokens: int
    trailers: dict[str, str]
    prompt_logprobs: list[float] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self.choices[0].ids


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def prompt(*parts: str) -> list[int]:
    """The ids of a chat turn; `IMAGE` and `VIDEO` among the parts are anchors."""
    text = "".join(("<|im_start|>user\n", *parts, "<|im_end|>\n<|im_start|>assistant\n"))
    ids: list[int] = tokenizer().encode(text).ids
    return ids


def data_url(name: str) -> str:
    """A picture of tests/data/images as a data: URL of its kind."""
    kind = {"jpg": "jpeg"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
    content = base64.b64encode((IMAGES / name).read_bytes()).decode()
    return f"data:image/{kind};base64,{content}"


def ref(source: str | bytes, modality: common.Modality = common.IMAGE) -> engine.MediaRef:
    """A reference by URL, or one with the file's bytes inline."""
    if isinstance(source, bytes):
        return engine.MediaRef(modality=modality, data=source)
    return engine.MediaRef(modality=modality, url=source)


def request(
    ids: Sequence[int],
    *refs: engine.MediaRef,
    mode: engine.MmProcessing = engine.UNSPECIFIED,
    max_tokens: int = 12,
    stream: bool = True,
    request_id: str = "",
) -> engine.GenerateRequest:
    """A greedy request that does not stop early and asks for logprobs."""
    asked = engine.GenerateRequest(
        request_id=request_id,
        tokenized=engine.TokenizedInput(input_ids=ids),
        sampling_params=engine.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1
        ),
        stream=stream,
    )
    if refs:
        asked.media_refs.items.extend(refs)
    if mode != engine.UNSPECIFIED:
        asked.router.mm_processing = mode
    return asked


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[VllmEngineStub]:
    async with grpc.aio.insecure_channel(address, LIMITS) as channel:
        yield VllmEngineStub(channel)


async def ask(address: str, asked: engine.GenerateRequest) -> Answer:
    """Sends it and collects the answer; raises AioRpcError for any other end."""
    async with connect(address) as stub:
        return await collect(stub, asked)


async def collect(stub: VllmEngineStub, asked: engine.GenerateRequest) -> Answer:
    call = stub.Generate(asked, timeout=DEADLINE)
    answer = Answer({}, 0, 0, {})
    async for response in call:
        kind = response.WhichOneof("response")
        part = response.chunk if kind == "chunk" else response.complete
        choice = answer.choices.setdefault(part.index, Choice())
        if kind == "complete":
            choice.finish_reason = part.finish_reason
            answer.prompt_tokens = part.prompt_tokens
            answer.cached_tokens = part.cached_tokens
        # The Complete of a stream repeats its last chunk.
        if kind == "chunk":
            choice.ids += part.token_ids
        elif not asked.stream:
            choice.ids += part.output_ids
        if kind == "chunk" or not asked.stream:
            choice.logprobs += part.output_logprobs.token_logprobs
            answer.prompt_logprobs += (p.value for p in part.input_logprobs.token_logprobs)
    trailers = await call.trailing_metadata()
    answer.trailers = {key: str(value) for key, value in trailers or ()}
    return answer


async def flush(*addresses: str) -> None:
    """Empties the prefix caches, so that every answer is computed."""

    async def one(address: str) -> None:
        async with connect(address) as stub:
            await stub.FlushCache(common.FlushCacheRequest(), timeout=DEADLINE)

    await asyncio.gather(*map(one, addresses))


async def running(address: str) -> int:
    """Requests that a worker says it runs or holds."""
    async with connect(address) as stub:
        loads = await stub.GetLoads(engine.GetLoadsRequest(), timeout=DEADLINE)
    return sum(load.num_total_reqs for load in loads.loads)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The reason in the ErrorInfo that the router sends with every error of its own."""
    packed = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    assert isinstance(packed, bytes)
    info = error_details_pb2.ErrorInfo()
    details = status_pb2.Status.FromString(packed).details
    return str(info.reason) if any(detail.Unpack(info) for detail in details) else ""
