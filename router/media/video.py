"""Clips: judged by their header, then the wanted frames and no others.

FFmpeg is by far the largest decoder here, so clips are only ever opened in a
decoder process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from router.faults import Fault, Reason
from router.media.decode import Pixels
from router.media.formats import isobmff
from router.media.limits import VideoLimits
from router.media.sandbox.process import DecoderProcess, SandboxFailed
from router.media.sandbox.protocol import Job, Kind
from router.media.sniff import foreign_name, format_of
from router.media.video_header import VideoHeader

_EBML = b"\x1a\x45\xdf\xa3"


def check_container(data: bytes, *, index: int) -> None:
    """Lets MP4, QuickTime and WebM through. Raises Fault MEDIA_FORMAT_UNSUPPORTED."""
    image = format_of(data)
    mp4 = bool(isobmff.brands(data)) and image is None and not isobmff.is_heif(data)
    if mp4 or data.startswith(_EBML):
        return
    name = image.value if image else foreign_name(data)
    raise Fault.of_item(
        Reason.MEDIA_FORMAT_UNSUPPORTED, index, f"the data is {name}; supported are MP4 and WebM"
    )


def open_clip(
    process: DecoderProcess, data: bytes, limits: VideoLimits, *, index: int
) -> VideoHeader:
    """Reads the header of a clip and judges it. Blocks.

    Raises Fault MEDIA_DECODE_FAILED for a damaged clip, MEDIA_TOO_LARGE for one
    that is over a limit.
    """
    try:
        answer, _ = process.call(
            Job(Kind.VIDEO_HEADER, len(data)), data, timeout=limits.open_timeout
        )
    except SandboxFailed:
        raise _damaged(index) from None
    header = VideoHeader(answer.width, answer.height, answer.frames, answer.fps)
    for what, value, limit in (
        ("pixels a frame", header.width * header.height, limits.max_frame_pixels),
        ("frames", header.frames, limits.max_frames),
        ("seconds", header.duration, limits.max_duration),
    ):
        if value > limit:
            raise Fault.of_item(
                Reason.MEDIA_TOO_LARGE,
                index,
                f"the clip has {value:.0f} {what}, the limit is {limit:.0f}",
                size=value,
                limit=limit,
            )
    return header


def check_frames(
    header: VideoHeader, indices: Sequence[int], limits: VideoLimits, *, index: int
) -> int:
    """How many pixels the wanted frames have in all.

    Raises ValueError for indices that fall or lie outside the clip, Fault
    MEDIA_TOO_LARGE for more pixels than one clip may have.
    """
    if not indices or indices[0] < 0 or indices[-1] >= header.frames:
        raise ValueError("frame indices lie outside the clip")
    if any(a > b for a, b in pairwise(indices)):
        raise ValueError("frame indices fall")
    pixels = len(indices) * header.width * header.height
    if pixels > limits.max_total_pixels:
        raise Fault.of_item(
            Reason.MEDIA_TOO_LARGE,
            index,
            f"{len(indices)} frames of the clip have {pixels} pixels,"
            f" the limit is {limits.max_total_pixels}",
            size=pixels,
            limit=limits.max_total_pixels,
        )
    return pixels


def read_frames(
    process: DecoderProcess,
    data: bytes,
    header: VideoHeader,
    indices: Sequence[int],
    limits: VideoLimits,
    *,
    index: int,
) -> Pixels:
    """The frames at `indices`, in rising order: uint8 [n, height, width, 3], RGB. Blocks.

    Raises Fault MEDIA_DECODE_FAILED when the clip is damaged or does not hold
    what its header says.
    """
    order = np.asarray(indices, np.int64).tobytes()
    try:
        _, pixels = process.call(
            Job(Kind.VIDEO_FRAMES, len(data), len(indices)),
            order,
            data,
            timeout=limits.decode_timeout,
            shape=(len(indices), header.height, header.width, 3),
        )
    except SandboxFailed:
        raise _damaged(index) from None
    return pixels


def _damaged(index: int) -> Fault:
    return Fault.of_item(
        Reason.MEDIA_DECODE_FAILED, index, "the clip is damaged or does not decode in time"
    )
