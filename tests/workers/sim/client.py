"""A worker and a client of it, for the tests of this directory."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from router.media.intake import MediaIntake, MediaSource
from router.vision.backend.cpu import CpuBackend
from router.vision.files import ModelFiles
from router.vision.plan import ModelSpec, PixelFormat
from router.vision.registry import spec_for
from router.vision.tensors import build_batch
from router.wire import common, engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineStub
from workers.sim import SimOptions, SimWorker
from workers.sim.bundle import model_files
from workers.sim.references import RAW
from workers.sim.tokenizer import decode, encode

IMAGES = Path(__file__).parents[2] / "data" / "images"
CLIP = Path(__file__).parents[2] / "data" / "video" / "clip_320x240.mp4"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass
class Client:
    """A running worker and a stub of its service."""

    worker: SimWorker
    channel: grpc.aio.Channel
    stub: Any

    async def generate(
        self, request: engine.GenerateRequest, metadata: Sequence[tuple[str, str]] = ()
    ) -> list[engine.GenerateResponse]:
        call = self.stub.Generate(request, metadata=tuple(metadata), timeout=30)
        return [response async for response in call]

    async def say(self, request: engine.GenerateRequest) -> str:
        """The text of the only choice of a request without stream."""
        (response,) = await self.generate(request)
        return decode(response.complete.output_ids, special=False)

    async def refusal(
        self, request: engine.GenerateRequest, metadata: Sequence[tuple[str, str]] = ()
    ) -> grpc.aio.AioRpcError:
        """The error that the call ends with; fails when it ends well."""
        try:
            await self.generate(request, metadata)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("the call ended with OK")


@asynccontextmanager
async def client_of(options: SimOptions | None = None) -> AsyncIterator[Client]:
    worker = SimWorker(options)
    address = await worker.start("127.0.0.1:0")
    limits = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    try:
        async with grpc.aio.insecure_channel(address, options=limits) as channel:
            yield Client(worker, channel, VllmEngineStub(channel))
    finally:
        await worker.stop(0)


def prompt(text: str, request_id: str = "r", **sampling: Any) -> engine.GenerateRequest:
    """A tokenized request."""
    return engine.GenerateRequest(
        request_id=request_id,
        tokenized=engine.TokenizedInput(input_ids=encode(text)),
        sampling_params=engine.SamplingParams(**sampling),
    )


def streamed(text: str, request_id: str = "r", **sampling: Any) -> engine.GenerateRequest:
    request = prompt(text, request_id, **sampling)
    request.stream = True
    return request


def data_url(image: str) -> str:
    """A file of tests/data/images as a data: URL."""
    payload = base64.b64encode((IMAGES / image).read_bytes()).decode()
    return f"data:application/octet-stream;base64,{payload}"


def referring(text: str, *urls: str) -> engine.GenerateRequest:
    """A request with image references."""
    request = prompt(text)
    for url in urls:
        request.media_refs.items.add(modality=common.IMAGE, url=url)
    return request


def chunk_ids(responses: Sequence[engine.GenerateResponse], index: int = 0) -> list[int]:
    """All ids of one choice of a stream, from its chunks alone."""
    return [
        token
        for response in responses
        if response.HasField("chunk") and response.chunk.index == index
        for token in response.chunk.token_ids
    ]


def completes(responses: Sequence[engine.GenerateResponse]) -> list[engine.GenerateComplete]:
    return [response.complete for response in responses if response.HasField("complete")]


@cache
def _spec(model_type: str = "qwen3_vl") -> ModelSpec:
    files = model_files(SimOptions(model_type=model_type))
    spec = spec_for(model_type, (), ModelFiles.from_archive(files))
    assert spec is not None
    return spec


async def with_clip_tensors(
    text: str, clip: Path, pixel_format: PixelFormat = RAW
) -> engine.GenerateRequest:
    """A request as a router builds it that preprocesses one clip itself."""
    spec, intake = _spec(), MediaIntake()
    try:
        with intake.ticket() as ticket:
            loaded = await ticket.load_clip(_source(clip), 0)
            header = loaded.header
            plan = spec.plan_video(
                header.width,
                header.height,
                index=0,
                total_frames=header.frames,
                fps=header.fps,
            )
            frames = await ticket.frames(loaded, plan.frames)
    finally:
        await intake.close()
    expanded = spec.expand(encode(text), [plan])
    array = spec.pack(plan, frames, pixel_format, CpuBackend())
    batch = build_batch(spec, [plan], [array], pixel_format, expanded.ranges, ["the clip"])
    request = prompt("")
    request.tokenized.input_ids.extend(expanded.ids.tolist())
    request.mm_inputs.CopyFrom(batch.message())
    return request


def _source(clip: Path) -> MediaSource:
    return MediaSource("video", data=clip.read_bytes())


@cache
def _pixels(image: str) -> NDArray[np.uint8]:
    with Image.open(IMAGES / image) as opened:
        return np.asarray(opened.convert("RGB"))


def with_tensors(
    text: str,
    *images: str,
    pixel_format: PixelFormat = RAW,
    hashes: Sequence[str] | None = None,
    model_type: str = "qwen3_vl",
) -> engine.GenerateRequest:
    """A request as a router builds it that preprocesses the pictures itself."""
    spec, backend = _spec(model_type), CpuBackend()
    pixels = [_pixels(image) for image in images]
    plans = [spec.plan_image(p.shape[1], p.shape[0], index=at) for at, p in enumerate(pixels)]
    expanded = spec.expand(encode(text), plans)
    arrays = [spec.pack(*pair, pixel_format, backend) for pair in zip(plans, pixels, strict=True)]
    batch = build_batch(
        spec,
        plans,
        arrays,
        pixel_format,
        expanded.ranges,
        hashes or [f"hash of {i}" for i in images],
    )
    request = prompt("")
    request.tokenized.input_ids.extend(expanded.ids.tolist())
    request.mm_inputs.CopyFrom(batch.message())
    return request
