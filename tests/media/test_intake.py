"""References in, pixels out, and the budget whole again afterwards."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import pytest

from router.faults import Fault, Reason
from router.media.budget import Amount
from router.media.intake import MediaIntake, MediaSource
from router.media.limits import FetchLimits, MediaLimits
from tests.media.images import GOLDENS, read, sha256


def data_url(name: str, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(read(name)).decode()}"


@pytest.fixture
async def intake() -> AsyncIterator[MediaIntake]:
    intake = MediaIntake(MediaLimits(fetch=FetchLimits(allow_private_hosts=True), worker_threads=2))
    yield intake
    assert intake.budget.used == Amount()
    await intake.close()


@pytest.mark.parametrize("name", ["photo_640x480.jpg", "tiny_20x30.png", "exif_6_24x16.jpg"])
async def test_a_data_url_becomes_the_reference_pixels(intake: MediaIntake, name: str) -> None:
    async with intake.ticket() as ticket:
        blob = await ticket.load(MediaSource("image", url=data_url(name)), 0)
        assert intake.budget.used.nbytes == len(read(name))
        pixels = await ticket.decode(blob)
        assert intake.budget.used.pixels == blob.header.pixels
    assert sha256(pixels) == GOLDENS[name]["sha256"]


async def test_inline_bytes_become_the_reference_pixels(intake: MediaIntake) -> None:
    name = "rgba_203x151.png"
    async with intake.ticket() as ticket:
        blob = await ticket.load(MediaSource("image", data=read(name)), 0)
        assert sha256(await ticket.decode(blob)) == GOLDENS[name]["sha256"]


async def test_the_declared_media_type_does_not_matter(intake: MediaIntake) -> None:
    async with intake.ticket() as ticket:
        url = data_url("tiny_20x30.png", "image/jpeg")
        blob = await ticket.load(MediaSource("image", url=url), 0)
        assert (await ticket.decode(blob)).shape == (30, 20, 3)


async def test_a_failed_item_gives_back_what_it_took(intake: MediaIntake) -> None:
    with pytest.raises(Fault) as caught:
        async with intake.ticket() as ticket:
            await ticket.load(MediaSource("image", data=read("tiny_20x30.png")), 0)
            await ticket.load(MediaSource("image", data=b"not a picture"), 1)
    assert caught.value.reason is Reason.MEDIA_FORMAT_UNSUPPORTED
    assert caught.value.metadata["index"] == "1"
