"""Decoding in a process that may die.

A decoder is native code that strangers feed. Those that see nearly all of the
traffic run in this process, for their speed, behind header limits that bound
their work. The rest, whose code is larger or whose work no header bounds, run
in a few processes of their own with limits on memory, time and files. If such
a process aborts, runs away or is taken over, a picture is lost and the process
replaced; the streams of the others go on.

What comes back from the child is never trusted: fixed-size integers and raw
pixels, no pickles, and the size must be the one that the header promised.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from router.media.sandbox.protocol import ANSWER, JOB, READY, Answer, Job, Status

P = ParamSpec("P")
T = TypeVar("T")

# Imports on a busy machine.
_START_TIMEOUT = 30.0


class SandboxFailed(Exception):
    """The child refused the data, died of it, or took too long."""


class DecoderProcess:
    """One child at a time, used by one thread at a time; started when it is needed."""

    def __init__(self, *, memory: int, module: str = "router.media.sandbox.child") -> None:
        self._memory = memory
        self._module = module
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closing = False
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Starts the child unless it runs, and waits until it is ready.

        Raises RuntimeError when it does not start: our own fault, not the data's.
        """
        if self._child is not None and self._child.poll() is None:
            return
        self.stop()
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Decoders print what the data tells them to.
                stderr=subprocess.DEVNULL,
                env=_environment(self._memory),
            )
        self._socket = ours
        if self._closing:
            self.stop()
            raise RuntimeError("the sandbox is closed")
        try:
            ready = self._receive(len(READY), time.monotonic() + _START_TIMEOUT)
        except (OSError, EOFError) as error:
            self.stop()
            raise RuntimeError("the decoder process does not start") from error
        assert ready == READY

    def call(
        self, job: Job, *data: bytes, timeout: float, shape: tuple[int, ...] | None = None
    ) -> tuple[Answer, NDArray[np.uint8]]:
        """Sends one job, its data in as many pieces as they come in, and waits for its answer.

        Returns the answer's numbers and its pixels, uint8, of `shape` (empty
        where no shape is given). Raises SandboxFailed; the child is then gone
        unless it refused the data itself.
        """
        self.start()
        assert self._socket is not None
        deadline = time.monotonic() + timeout
        pixels = np.empty(shape if shape is not None else 0, np.uint8)
        try:
            self._send(JOB.pack(*job), deadline)
            for piece in data:
                self._send(piece, deadline)
            answer = Answer(*ANSWER.unpack(self._receive(ANSWER.size, deadline)))
            if answer.status == Status.OK:
                if answer.nbytes != pixels.nbytes:
                    raise SandboxFailed("another size than the header's")
                self._receive_into(pixels.reshape(-1).data, deadline)
        except (OSError, EOFError, SandboxFailed) as error:
            self.restarts += 1
            self.stop()
            raise SandboxFailed("died or took too long") from error
        if answer.status != Status.OK:
            raise SandboxFailed("damaged data")
        return answer, pixels

    def interrupt(self) -> None:
        """Kills the child for good, from any thread; a job in it fails, none follows."""
        self._closing = True
        child = self._child
        if child is not None:
            child.kill()

    def stop(self) -> None:
        """Kills the child and waits for its end; for the thread that uses it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def _send(self, message: bytes, deadline: float) -> None:
        assert self._socket is not None
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(message)

    def _receive(self, size: int, deadline: float) -> bytes:
        buffer = bytearray(size)
        self._receive_into(memoryview(buffer), deadline)
        return bytes(buffer)

    def _receive_into(self, view: memoryview, deadline: float) -> None:
        assert self._socket is not None
        while view:
            self._socket.settimeout(_left(deadline))
            count = self._socket.recv_into(view)
            if count == 0:
                raise EOFError
            view = view[count:]


class Sandbox:
    """As many decoder processes as threads use it; each thread has its own."""

    def __init__(self, *, memory: int) -> None:
        self._memory = memory
        self._mine = threading.local()
        self._all: list[DecoderProcess] = []
        self._lock = threading.Lock()

    def run(
        self, work: Callable[Concatenate[DecoderProcess, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Calls `work` with the calling thread's process."""
        return work(self._process(), *args, **kwargs)

    def start(self) -> None:
        """Starts the calling thread's process now, so that the first picture need not wait."""
        self._process().start()

    @property
    def restarts(self) -> int:
        """How many children had to be killed."""
        return sum(process.restarts for process in self._all)

    def interrupt(self) -> None:
        """Kills every child; jobs in them fail."""
        with self._lock:
            for process in self._all:
                process.interrupt()

    def stop(self) -> None:
        """Clears up after every child. No thread may be using one any more."""
        with self._lock:
            for process in self._all:
                process.stop()

    def _process(self) -> DecoderProcess:
        process: DecoderProcess | None = getattr(self._mine, "process", None)
        if process is None:
            process = self._mine.process = DecoderProcess(memory=self._memory)
            with self._lock:
                self._all.append(process)
        return process


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _environment(memory: int) -> dict[str, str]:
    """The child sees its imports and its limits, none of the parent's secrets."""
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in (os.getcwd(), *sys.path) if path),
        "PYTHONHASHSEED": "0",
        # One thread each: the limit on memory counts every thread's stack.
        "OPENBLAS_NUM_THREADS": "1",
        "MMROUTER_SANDBOX_MEMORY": str(memory),
    }
    with contextlib.suppress(KeyError):
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return environment
