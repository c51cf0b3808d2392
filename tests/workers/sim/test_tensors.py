"""Preprocessed media: read back into pictures, and deadly when they contradict themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import grpc
import numpy as np
import pytest

from router.vision.plan import PixelFormat
from router.wire import common, engine
from tests.workers.sim.client import (
    PICTURE,
    client_of,
    data_url,
    prompt,
    referring,
    with_tensors,
)
from workers.sim import SimOptions
from workers.sim.references import RAW
from workers.sim.tokenizer import encode

PHOTO, NOISE, SMALL = "photo_640x480.jpg", "noise_299x211.jpg", "tiny_28x28.jpg"
ASK = PICTURE + "Describe it"


@pytest.mark.parametrize("image", [PHOTO, NOISE, SMALL, "tall_7x903.png"])
async def test_tensors_and_reference_of_one_picture_get_the_same_answer(image: str) -> None:
    async with client_of() as client:
        by_tensors = await client.say(with_tensors(ASK, image))
        by_reference = await client.say(referring(ASK, data_url(image)))
    assert by_tensors == by_reference
    assert "hash" in by_tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("normalized", [True, False])
async def test_any_dtype_gives_the_same_picture(dtype: str, normalized: bool) -> None:
    pixel_format = PixelFormat(dtype, normalized)  # type: ignore[arg-type]
    async with client_of(SimOptions(device_normalize=not normalized)) as client:
        by_tensors = await client.say(with_tensors(ASK, NOISE, pixel_format=pixel_format))
        by_reference = await client.say(referring(ASK, data_url(NOISE)))
    assert by_tensors == by_reference


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
async def test_the_older_families_are_read_both_ways_alike(model_type: str, dtype: str) -> None:
    """Their statistics do not survive bfloat16 for every level, in neither way."""
    options = SimOptions(model_type=model_type, device_normalize=False, encoder_dtype=dtype)
    sent = PixelFormat(dtype, normalized=True)  # type: ignore[arg-type]
    async with client_of(options) as client:
        by_tensors = await client.say(
            with_tensors(ASK, PHOTO, pixel_format=sent, model_type=model_type)
        )
        by_reference = await client.say(referring(ASK, data_url(PHOTO)))
    assert by_tensors == by_reference
    assert "644x476 pixels" in by_tensors


@pytest.mark.parametrize(
    ("device_normalize", "sent"), [(True, PixelFormat("float32", True)), (False, RAW)]
)
async def test_the_wrong_kind_of_values_is_silently_the_wrong_picture(
    device_normalize: bool, sent: PixelFormat
) -> None:
    async with client_of(SimOptions(device_normalize=device_normalize)) as client:
        wrong = await client.say(with_tensors(ASK, NOISE, pixel_format=sent))
        right = await client.say(referring(ASK, data_url(NOISE)))
    assert wrong != right
    assert wrong.split("mean colour")[0] == right.split("mean colour")[0]


async def test_other_pixels_under_a_known_hash_get_the_old_answer() -> None:
    flipped = with_tensors(ASK, NOISE, hashes=["h"])
    pixels = np.frombuffer(flipped.mm_inputs.pixel_values.inline, np.uint8)
    flipped.mm_inputs.pixel_values.inline = (255 - pixels).tobytes()
    async with client_of() as client:
        first = await client.say(with_tensors(ASK, NOISE, hashes=["h"]))
        assert await client.say(flipped) == first
        flipped.mm_inputs.mm_hashes[:] = ["g"]
        assert await client.say(flipped) != first


async def test_two_pictures_are_cut_apart_where_the_sizes_say() -> None:
    async with client_of() as client:
        by_tensors = await client.say(with_tensors(PICTURE * 2, PHOTO, NOISE))
        by_reference = await client.say(referring(PICTURE * 2, data_url(PHOTO), data_url(NOISE)))
    assert by_tensors == by_reference
    assert "Image 2 is" in by_tensors


async def test_messages_far_over_grpcs_own_limit_are_taken() -> None:
    request = with_tensors(
        ASK, "photo_1920x1080.jpg", pixel_format=PixelFormat("float32", normalized=True)
    )
    assert request.ByteSize() > 20_000_000
    async with client_of(SimOptions(device_normalize=False)) as client:
        assert "1920x1088 pixels" in await client.say(request)


def _longer(request: engine.GenerateRequest) -> None:
    request.mm_inputs.mm_placeholders[0].length += 1


def _past_the_end(request: engine.GenerateRequest) -> None:
    request.mm_inputs.mm_placeholders[0].offset = len(request.tokenized.input_ids) - 3


def _fewer_patches(request: engine.GenerateRequest) -> None:
    pixels = request.mm_inputs.pixel_values
    pixels.shape[0] -= 4
    pixels.inline = pixels.inline[: pixels.shape[0] * pixels.shape[1]]


def _larger_grid(request: engine.GenerateRequest) -> None:
    request.mm_inputs.model_specific_tensors["image_grid_thw"].inline = np.array(
        [[1, 32, 40]], "<i8"
    ).tobytes()


def _other_sizes(request: engine.GenerateRequest) -> None:
    sizes = request.mm_inputs.model_specific_tensors["patches_per_image"]
    sizes.inline = (np.frombuffer(sizes.inline, "<i8") - 1).tobytes()


def _other_dimension(request: engine.GenerateRequest) -> None:
    pixels = request.mm_inputs.pixel_values
    pixels.shape[:] = [pixels.shape[0] * 2, pixels.shape[1] // 2]


def _no_grid(request: engine.GenerateRequest) -> None:
    del request.mm_inputs.model_specific_tensors["image_grid_thw"]


DEADLY = [
    _longer,
    _past_the_end,
    _fewer_patches,
    _larger_grid,
    _other_sizes,
    _other_dimension,
    _no_grid,
]


@pytest.mark.parametrize("spoil", DEADLY)
async def test_a_deadly_request_ends_the_engine_and_leaves_the_port_open(
    spoil: Callable[[engine.GenerateRequest], None],
) -> None:
    request = with_tensors(ASK, PHOTO)
    spoil(request)
    async with client_of() as client:
        other = client.stub.Generate(prompt("[[sim: hang]]", "other"))
        assert (await client.refusal(request)).code() is grpc.StatusCode.INTERNAL
        assert (await client.refusal(prompt("after"))).code() is grpc.StatusCode.INTERNAL
        health = await client.stub.HealthCheck(engine.HealthCheckRequest())
        assert not health.healthy
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await other.read()
        assert broken.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("spoil", DEADLY)
async def test_an_immortal_engine_blames_the_client_and_lives_on(
    spoil: Callable[[engine.GenerateRequest], None],
) -> None:
    request = with_tensors(ASK, PHOTO)
    spoil(request)
    async with client_of(SimOptions(mortal=False)) as client:
        assert (await client.refusal(request)).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await client.say(prompt("after"))


async def test_a_prompt_over_the_context_kills_the_rust_servicers_engine_alone() -> None:
    async with client_of(SimOptions(max_context=10)) as client:
        await client.refusal(prompt("x" * 10))
        assert client.worker.engine.dead is None
    async with client_of(SimOptions(max_context=10, style="rust")) as client:
        assert (await client.refusal(prompt("x" * 10))).code() is grpc.StatusCode.INTERNAL
        assert client.worker.engine.dead is not None


async def test_a_placeholder_that_is_too_short_is_served_wrong() -> None:
    request = with_tensors(ASK, PHOTO)
    request.mm_inputs.mm_placeholders[0].length -= 8
    async with client_of() as client:
        assert "Only 292 of its 300 features had a place." in await client.say(request)


async def test_tensors_beside_a_text_prompt_are_dropped() -> None:
    request = with_tensors(ASK, PHOTO)
    request.text = "just text"
    async with client_of() as client:
        assert await client.say(request) == await client.say(prompt("just text"))


async def test_tensors_that_the_servicer_sees_through_are_the_clients_fault() -> None:
    no_hash, no_pixels, short, unknown = (with_tensors(ASK, SMALL) for _ in range(4))
    del no_hash.mm_inputs.mm_hashes[:]
    no_pixels.mm_inputs.ClearField("pixel_values")
    short.mm_inputs.pixel_values.inline = short.mm_inputs.pixel_values.inline[:-1]
    unknown.mm_inputs.pixel_values.dtype = "complex64"
    async with client_of() as client:
        for request in (no_hash, no_pixels, short, unknown):
            assert (await client.refusal(request)).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert client.worker.engine.dead is None


async def test_the_item_limit_holds_for_tensors_too() -> None:
    async with client_of(SimOptions(item_limits=(("image", 1),))) as client:
        error = await client.refusal(with_tensors(PICTURE * 2, SMALL, SMALL))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_pixels_are_read_from_shared_memory_where_it_was_advertised() -> None:
    request = with_tensors(ASK, SMALL)
    tensor = request.mm_inputs.pixel_values
    payload = tensor.inline
    segment = Path("/dev/shm") / f"mmrouter-test-{uuid4().hex}"
    segment.write_bytes(b"head" + payload)
    tensor.shm.CopyFrom(common.ShmHandle(name=segment.name, offset=4, nbytes=len(payload)))
    try:
        async with client_of(SimOptions(shm_namespace_id="here")) as client:
            assert await client.say(request) == await client.say(with_tensors(ASK, SMALL))
            # As the real servicer does, it removes what it has read.
            assert not segment.exists()
            error = await client.refusal(request)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        segment.write_bytes(b"head" + payload)
        async with client_of() as client:
            error = await client.refusal(request)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        segment.unlink(missing_ok=True)


async def test_the_prefix_cache_is_shared_by_the_same_picture_alone() -> None:
    text = PICTURE + "x" * 40

    async def cached(request: engine.GenerateRequest) -> int:
        (response,) = await client.generate(request)
        return response.complete.cached_tokens

    async with client_of() as client:
        assert await cached(with_tensors(text, SMALL, hashes=["a"])) == 0
        same = await cached(with_tensors(text, SMALL, hashes=["a"]))
        other = await cached(with_tensors(text, SMALL, hashes=["b"]))
    assert same > len(encode(text))
    assert other == 0
