"""Lines of the log on their way to standard error, which may take its time or take nothing.

At its other end may be a pipe that nobody reads or whose reader has gone, a
full disk, a terminal that is held. Whoever logs must neither wait for that nor
fail by it: a thread writes, and lines that cannot be written are counted.
"""

from __future__ import annotations

import os
import select
import threading
from queue import SimpleQueue

import structlog

_log = structlog.get_logger(room="app")

_STANDARD_ERROR = 2
# Lines that wait; what is said beyond them is lost. Each has 2 KB at most as JSON.
_MOST = 4096
# Seconds that the last lines get when the process ends.
_PATIENCE = 1.0


class Lines:
    """A stream that takes text at once and writes it to a descriptor bit by bit.

    `lost` counts the lines that were not written; once one is written again, a
    line `log_lines_lost` says how many were not. The thread ends with the process.
    """

    def __init__(self, descriptor: int = _STANDARD_ERROR, most: int = _MOST) -> None:
        self.lost = 0
        self._descriptor = descriptor
        self._most = most
        self._told = 0
        # The last line was written in part.
        self._torn = False
        self._losing = threading.Lock()
        self._waiting: SimpleQueue[str | threading.Event] = SimpleQueue()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        """Takes a line; returns its length. Never waits and never fails."""
        if self._waiting.qsize() < self._most:
            self._waiting.put(text)
        else:
            self._lose()
        return len(text)

    def flush(self) -> None:
        """Nothing: whoever logs does not wait."""

    def drain(self, patience: float = _PATIENCE) -> None:
        """Waits until what was taken so far is written, `patience` seconds at most."""
        written = threading.Event()
        self._waiting.put(written)
        written.wait(patience)

    def isatty(self) -> bool:
        """Whether a terminal reads it."""
        return os.isatty(self._descriptor)

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
            elif not self._write(item):
                self._lose()
            elif self._told < self.lost:
                lost, self._told = self.lost - self._told, self.lost
                _log.warning("log_lines_lost", lines=lost)

    def _write(self, text: str) -> bool:
        rest = memoryview(("\n" * self._torn + text).encode(errors="backslashreplace"))
        self._torn = False
        while rest:
            try:
                written = os.write(self._descriptor, rest)
            except BlockingIOError:  # whoever shares it made it so
                waiting = select.poll()
                waiting.register(self._descriptor, select.POLLOUT)
                waiting.poll()
            except OSError:
                return False
            else:
                rest = rest[written:]
                self._torn = bool(rest)
        return True

    def _lose(self) -> None:
        with self._losing:
            self.lost += 1
