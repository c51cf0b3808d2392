"""Clips: the frames that were asked for, and only within the limits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import cv2
import numpy as np
import pytest
import pytest_asyncio

from router.faults import Fault, Reason
from router.media.budget import Amount
from router.media.intake import MediaIntake, MediaSource
from router.media.limits import MediaLimits, VideoLimits
from router.media.video import check_container, check_frames
from router.media.video_header import VideoHeader
from tests.media.images import DATA, read, sha256

CLIP = (DATA / "video" / "clip_320x240.mp4").read_bytes()
GOLDEN = json.loads((DATA / "goldens" / "video.json").read_text())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def intake() -> AsyncIterator[MediaIntake]:
    intake = MediaIntake(MediaLimits(worker_threads=1))
    yield intake
    assert intake.budget.used == Amount()
    await intake.close()


def clip(data: bytes) -> MediaSource:
    return MediaSource("video", data=data)


@pytest.mark.asyncio(loop_scope="module")
class TestClips:
    async def test_every_frame_equals_the_reference(self, intake: MediaIntake) -> None:
        with intake.ticket() as ticket:
            opened = await ticket.load_clip(clip(CLIP), 0)
            assert opened.header == VideoHeader(320, 240, GOLDEN["frames"], GOLDEN["fps"])
            frames = await ticket.frames(opened, range(90))
        assert [sha256(frame) for frame in frames] == GOLDEN["all_frames_rgb_sha256"]

    async def test_chosen_frames_are_those_of_their_indices(self, intake: MediaIntake) -> None:
        chosen = [0, 0, 7, 8, 44, 89, 89]
        with intake.ticket() as ticket:
            opened = await ticket.load_clip(clip(CLIP), 0)
            frames = await ticket.frames(opened, chosen)
        assert frames.shape == (7, 240, 320, 3)
        assert frames.flags.c_contiguous
        expected = [GOLDEN["all_frames_rgb_sha256"][index] for index in chosen]
        assert [sha256(frame) for frame in frames] == expected

    async def test_webm_is_read_and_its_frames_are_counted(
        self, intake: MediaIntake, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        path = tmp_path_factory.mktemp("clip") / "clip.webm"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"VP80"), 10, (64, 48))
        for level in range(0, 240, 20):
            writer.write(np.full((48, 64, 3), level, np.uint8))
        writer.release()
        with intake.ticket() as ticket:
            opened = await ticket.load_clip(clip(path.read_bytes()), 0)
            assert opened.header == VideoHeader(64, 48, 12, 10.0)
            frames = await ticket.frames(opened, [1, 11])
        assert frames[0].mean() < frames[1].mean()

    @pytest.mark.parametrize("end", [100, 5_000, len(CLIP) // 2, len(CLIP) - 3000])
    async def test_a_clip_cut_short_is_refused(self, intake: MediaIntake, end: int) -> None:
        with intake.ticket() as ticket, pytest.raises(Fault) as caught:
            opened = await ticket.load_clip(clip(CLIP[:end]), 5)
            await ticket.frames(opened, range(opened.header.frames))
        assert caught.value.reason is Reason.MEDIA_DECODE_FAILED
        assert caught.value.metadata["index"] == "5"

    @pytest.mark.parametrize(
        "limits",
        [
            VideoLimits(max_frames=89),
            VideoLimits(max_duration=2.9),
            VideoLimits(max_frame_pixels=320 * 240 - 1),
            VideoLimits(max_bytes=len(CLIP) - 1),
        ],
    )
    async def test_a_clip_over_a_limit_is_refused_by_its_header(self, limits: VideoLimits) -> None:
        small = MediaIntake(MediaLimits(worker_threads=1, video=limits))
        with small.ticket() as ticket, pytest.raises(Fault) as caught:
            await ticket.load_clip(clip(CLIP), 0)
        await small.close()
        assert caught.value.reason is Reason.MEDIA_TOO_LARGE
        assert "limit" in caught.value.metadata


def test_frames_over_the_pixel_limit_are_refused_before_decode() -> None:
    header = VideoHeader(100, 100, 50, 25.0)
    limits = VideoLimits(max_total_pixels=100_000)
    assert check_frames(header, range(10), limits, index=0) == 100_000
    with pytest.raises(Fault) as caught:
        check_frames(header, range(11), limits, index=0)
    assert caught.value.reason is Reason.MEDIA_TOO_LARGE


@pytest.mark.parametrize("indices", [[], [-1], [50], [3, 2]])
def test_indices_outside_the_clip_are_a_bug_of_the_caller(indices: list[int]) -> None:
    with pytest.raises(ValueError, match="frame indices"):
        check_frames(VideoHeader(10, 10, 50, 25.0), indices, VideoLimits(), index=0)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (read("tiny_20x30.png"), "PNG"),
        (read("photo_203x151.avif"), "AVIF"),
        (read("bad_heic_magic.heic"), "HEIC"),
        (b"RIFF\0\0\0\0AVI LIST", "a RIFF file that is not WebP"),
        (b"#EXTM3U\n", "text"),
        (b"", "empty"),
    ],
)
def test_what_is_not_a_clip_is_named(data: bytes, name: str) -> None:
    with pytest.raises(Fault) as caught:
        check_container(data, index=0)
    assert caught.value.reason is Reason.MEDIA_FORMAT_UNSUPPORTED
    assert f"is {name};" in caught.value.message


def test_an_unknown_rate_has_no_duration() -> None:
    assert replace(VideoHeader(1, 1, 10, 5.0), fps=0.0).duration == 0.0
