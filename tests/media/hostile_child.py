"""A decoder process that does what the data tells it to: what a taken-over decoder could do."""

from __future__ import annotations

import os
import resource
import socket
import sys

from router.media.sandbox.confine import confine
from router.media.sandbox.protocol import ANSWER, JOB, READY, Answer, Job, Status

# What must not be possible.
ORDERS = (b"open", b"dial", b"fork", b"run!", b"kill", b"lift", b"wipe", b"link", b"lame")


def main() -> None:
    """Behaves badly on the data `abort`, `hang`, `eat`, `lie`, `stop`; else echoes it."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    confine(int(os.environ["MMROUTER_SANDBOX_MEMORY"]))
    connection.sendall(READY)
    while head := connection.recv(JOB.size):
        job = Job(*JOB.unpack(head))
        data = connection.recv(job.nbytes)
        answer = Answer(Status.OK, len(data))
        match data:
            case b"abort":
                os.abort()
            case b"hang":
                while True:
                    pass
            case b"eat":
                try:
                    bytearray(2**40)
                except MemoryError:
                    answer = Answer(Status.DAMAGED)
            case b"lie":
                answer = Answer(Status.OK, 2**40)
            case b"stop":
                connection.sendall(ANSWER.pack(*answer)[:5])
                return
            case _ if data in ORDERS:
                try:
                    _try(data)
                except FileNotFoundError:
                    pass  # it was let through, to where nothing is
                except (OSError, ValueError):
                    answer = Answer(Status.DAMAGED)
            case b"secrets?":
                data = b"secrets!" if "AWS_SECRET_ACCESS_KEY" in os.environ else b"none    "
        connection.sendall(ANSWER.pack(*answer))
        if answer.status == Status.OK:
            connection.sendall(data)


def _try(order: bytes) -> None:
    match order:
        case b"open":
            os.open("/etc/hostname", os.O_RDONLY)
        case b"dial":
            socket.socket()
        case b"fork":
            os.fork()
        case b"run!":
            os.execv("/bin/true", ["true"])
        case b"kill":
            os.kill(os.getppid(), 0)
        case b"lift":
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        case b"wipe":
            os.truncate("/nowhere/file", 0)
        case b"link":
            os.symlink("/etc/hostname", "/nowhere/link")
        case b"lame":
            resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)


if __name__ == "__main__":
    main()
