"""Clips, by reference and as tensors."""

from __future__ import annotations

import re

import grpc
import pytest

from router.vision.plan import PixelFormat
from router.wire import common, engine
from tests.workers.sim.client import (
    CLIP,
    IMAGES,
    PICTURE,
    VIDEO,
    client_of,
    prompt,
    with_clip_tensors,
)
from workers.sim import SimOptions

ASK = VIDEO + "What happens"
ANYWHERE = SimOptions(local_root=CLIP.parents[1])


def clip_reference(text: str = ASK) -> engine.GenerateRequest:
    request = prompt(text)
    request.media_refs.items.add(modality=common.VIDEO, url=CLIP.as_uri())
    return request


async def test_a_clip_is_read_and_spoken_of() -> None:
    async with client_of(ANYWHERE) as client:
        text = await client.say(clip_reference())
    assert "and 1 video." in text
    # 90 frames at 30 a second, sampled twice a second, two in each temporal patch.
    assert re.search(r"Video 1 is 6 frames of \d+x\d+ pixels \(grid 3x\d+x\d+\)", text)


@pytest.mark.parametrize(
    "pixel_format", [PixelFormat("uint8", False), PixelFormat("float32", True)]
)
async def test_tensors_and_reference_of_one_clip_get_the_same_answer(
    pixel_format: PixelFormat,
) -> None:
    options = SimOptions(local_root=CLIP.parents[1], device_normalize=not pixel_format.normalized)
    async with client_of(options) as client:
        by_tensors = await client.say(await with_clip_tensors(ASK, CLIP, pixel_format))
        assert by_tensors == await client.say(clip_reference())
    assert "Video 1" in by_tensors


async def test_a_picture_and_a_clip_go_together() -> None:
    request = prompt(PICTURE + VIDEO)
    photo = IMAGES / "photo_640x480.jpg"
    request.media_refs.items.add(modality=common.IMAGE, url=photo.as_uri())
    request.media_refs.items.add(modality=common.VIDEO, url=CLIP.as_uri())
    async with client_of(ANYWHERE) as client:
        text = await client.say(request)
    assert "and 1 image and 1 video." in text
    assert "Image 1 is 640x480 pixels" in text


async def test_a_clips_placeholders_are_the_pads_in_its_range() -> None:
    request = await with_clip_tensors(ASK, CLIP)
    # The tokens of a timestamp stand in the range as well; one pad more is one too many.
    place = request.mm_inputs.mm_placeholders[0]
    ids = request.tokenized.input_ids
    assert ids[place.offset] < 256
    ids[place.offset] = 151656
    async with client_of() as client:
        assert (await client.refusal(request)).code() is grpc.StatusCode.INTERNAL
        assert client.worker.engine.dead is not None


async def test_the_limit_for_clips_is_their_own() -> None:
    options = SimOptions(local_root=CLIP.parents[1], item_limits=(("video", 0),))
    async with client_of(options) as client:
        error = await client.refusal(clip_reference())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_picture_is_no_clip() -> None:
    request = prompt(ASK)
    photo = IMAGES / "photo_640x480.jpg"
    request.media_refs.items.add(modality=common.VIDEO, url=photo.as_uri())
    async with client_of(ANYWHERE) as client:
        assert (await client.refusal(request)).code() is grpc.StatusCode.INVALID_ARGUMENT
