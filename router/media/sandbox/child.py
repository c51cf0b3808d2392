"""The other side of the sandbox: reads jobs from a socket, decodes, answers.

Started by `router.media.sandbox.process` as `python -m router.media.sandbox.child FD`;
ends when the socket does.
"""

from __future__ import annotations

import os
import socket
import sys

import numpy as np
from PIL import Image

from router.faults import Fault
from router.media.decode import Pixels, decode_in_process
from router.media.header import ImageFormat
from router.media.sandbox.clip import VideoDamaged, frames_at, read_header
from router.media.sandbox.confine import confine
from router.media.sandbox.protocol import ANSWER, JOB, READY, Answer, Job, Kind, Status
from router.media.sniff import sniff

_NO_PIXELS: Pixels = np.empty(0, np.uint8)


def main() -> None:
    """Confines this process, then serves until the parent hangs up."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Pillow imports its plugins late, and no file can be opened then.
    Image.init()
    confine(int(os.environ["MMROUTER_SANDBOX_MEMORY"]))
    connection.sendall(READY)
    while (job := _receive(connection, JOB.size)) is not None:
        answer, pixels = _run(connection, Job(*JOB.unpack(job)))
        connection.sendall(ANSWER.pack(*answer))
        connection.sendall(pixels.reshape(-1).data)


def _run(connection: socket.socket, job: Job) -> tuple[Answer, Pixels]:
    indices = _receive(connection, job.nindices * 8)
    data = _receive(connection, job.nbytes)
    if indices is None or data is None:
        raise SystemExit(0)
    try:
        if job.kind == Kind.IMAGE:
            header = sniff(data, max_pixels=2**40, index=0, formats=frozenset(ImageFormat))
            red, green, blue = job.background.to_bytes(3)
            pixels = decode_in_process(data, header, 0, background=(red, green, blue))
            return Answer(Status.OK, pixels.nbytes, header.width, header.height), pixels
        if job.kind == Kind.VIDEO_HEADER:
            video = read_header(data)
            size = (video.width, video.height, video.frames, video.fps)
            return Answer(Status.OK, 0, *size), _NO_PIXELS
        pixels = frames_at(data, np.frombuffer(indices, np.int64).tolist())
        return Answer(Status.OK, pixels.nbytes), pixels
    except (Fault, VideoDamaged, MemoryError):
        return Answer(Status.DAMAGED), _NO_PIXELS


def _receive(connection: socket.socket, size: int) -> bytes | None:
    """Exactly `size` bytes, or None when the parent has hung up."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            return None
        view = view[count:]
    return bytes(buffer)


if __name__ == "__main__":
    main()
