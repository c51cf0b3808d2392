"""Clips to frames with OpenCV and FFmpeg; runs in a decoder process only."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import cv2
import numpy as np

from router.media.decode import Pixels
from router.media.video_header import VideoHeader

# One thread: as many clips at once as there are decoder processes.
_OPTIONS = [cv2.CAP_PROP_N_THREADS, 1]


class VideoDamaged(Exception):
    """The clip cannot be read as its header says."""


def read_header(data: bytes) -> VideoHeader:
    """Frames, rate and size of a clip. Raises VideoDamaged.

    MP4 keeps a table of its samples. WebM keeps a duration, from which the number
    of frames can only be guessed, so there they are counted.
    """
    with _opened(data) as capture:
        width = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH))
        height = int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
        frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        fps = float(capture.get(cv2.CAP_PROP_FPS))
        if data[4:8] != b"ftyp":
            frames = 0
            while capture.grab():
                frames += 1
    if width <= 0 or height <= 0 or frames <= 0:
        raise VideoDamaged("no size")
    return VideoHeader(width, height, frames, fps if np.isfinite(fps) and fps > 0 else 0.0)


def frames_at(data: bytes, indices: Sequence[int]) -> Pixels:
    """The frames at `indices`, in rising order: uint8 [n, height, width, 3] RGB.

    Frames are grabbed one after the other and only the wanted ones converted:
    seeking to each was 8 to 14 times slower. Raises VideoDamaged when a wanted
    frame does not exist or has another size than the first.
    """
    kept: Pixels | None = None
    position = 0
    with _opened(data) as capture:
        for slot, wanted in enumerate(indices):
            if kept is not None and position > wanted:
                kept[slot] = kept[slot - 1]
                continue
            while position <= wanted:
                if not capture.grab():
                    raise VideoDamaged("fewer frames")
                position += 1
            found, frame = capture.retrieve()
            if not found:
                raise VideoDamaged("frame")
            if kept is None:
                kept = np.empty((len(indices), *frame.shape), np.uint8)
            if frame.shape != kept.shape[1:]:
                raise VideoDamaged("frame size")
            cv2.cvtColor(frame, cv2.COLOR_BGR2RGB, dst=kept[slot])
    if kept is None:
        raise VideoDamaged("no frames")
    return kept


@contextmanager
def _opened(data: bytes) -> Iterator[cv2.VideoCapture]:
    # OpenCV 5.0 lets go of the stream without the interpreter lock: it crashes
    # in release() unless somebody else still holds a reference.
    stream = io.BytesIO(data)
    try:
        # OpenCV's own annotations do not know that any file object will do.
        capture = cv2.VideoCapture(stream, cv2.CAP_FFMPEG, _OPTIONS)  # type: ignore[call-overload]
    except cv2.error as error:
        raise VideoDamaged("container") from error
    try:
        if not capture.isOpened():
            raise VideoDamaged("container")
        yield capture
    except cv2.error as error:
        raise VideoDamaged("decoder") from error
    finally:
        capture.release()
        stream.close()
