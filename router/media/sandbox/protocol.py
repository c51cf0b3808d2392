"""The few numbers that a decoder process and its parent exchange.

A job is a fixed header and the encoded data; an answer is a fixed header and
raw pixels. Nothing is parsed but integers.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

# kind, data bytes, frame indices (8 bytes each, ahead of the data), background as 0xRRGGBB
JOB = struct.Struct("<BQQI")
# status, pixel bytes, width, height, frames, frames per second
ANSWER = struct.Struct("<BQIIQd")

# The child's first byte: imported and confined.
READY = b"\x01"


class Kind(IntEnum):
    """What to do with the data."""

    IMAGE = 1
    VIDEO_HEADER = 2
    VIDEO_FRAMES = 3


class Status(IntEnum):
    """How it went."""

    OK = 0
    DAMAGED = 1


class Job(NamedTuple):
    """One order to the child."""

    kind: int
    nbytes: int
    nindices: int = 0
    background: int = 0xFFFFFF


class Answer(NamedTuple):
    """What the child says; to be believed no further than it can be checked."""

    status: int
    nbytes: int = 0
    width: int = 0
    height: int = 0
    frames: int = 0
    fps: float = 0.0
