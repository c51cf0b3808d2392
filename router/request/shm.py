"""Tensors for a worker on the same host, through shared memory instead of the message.

A segment belongs to one call of one worker. A worker removes it once it has
read it; the router removes it however the call ends, and what a router left
behind that was killed is swept when the next one starts. Who is alive is told
by a file lock, which containers that share /dev/shm but no process ids see too.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from router.fleet.worker import Worker
from router.observe.logging import get_logger
from router.vision.tensors import Batch
from router.wire import common

_log = get_logger("request")

ROOT = Path("/dev/shm")
_PREFIX = "mmrouter-"
_LOCK = ".lock"
# Of what is free; the rest is for the engines, which use the same memory.
_SHARE_OF_FREE = 0.5


def namespace_id(root: Path = ROOT) -> str:
    """Which shared memory this process sees, as workers word it; empty when that is not known.

    `BOOT_ID:ST_DEV`: the host since its start, and the tmpfs. Two processes with the
    same value see the same segments.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}:{root.stat().st_dev}"
    except OSError:
        return ""


class Segment:
    """The pixels of a request in shared memory, a file for each batch.

    Each its own, because a worker removes a file once it has read one tensor from it.
    """

    def __init__(self, paths: Sequence[Path], handles: Sequence[common.ShmHandle]) -> None:
        self._paths = paths
        self.handles = handles

    def unlink(self) -> None:
        """Removes it; a worker that has read it may have done so already."""
        _unlink(self._paths)


class SharedMemory:
    """The segments of one router process.

    `min_bytes`: smaller tensors go inline. Made when the router starts: takes
    its lock and sweeps what dead routers left.
    """

    def __init__(self, min_bytes: int, root: Path = ROOT) -> None:
        self.min_bytes = min_bytes
        self.namespace = namespace_id(root)
        self._root = root
        self._owner = uuid.uuid4().hex[:16]
        self._counter = itertools.count(1)
        self._lock = _locked(root / f"{_PREFIX}{self._owner}{_LOCK}")
        self._sweep()

    def close(self) -> None:
        """Removes everything that is left, and the lock."""
        _remove_all(self._root, self._owner)
        os.close(self._lock)

    async def share(self, batches: Sequence[Batch], worker: Worker) -> Segment | None:
        """A segment with the batches' pixels, or None where they must go inline.

        That is when the worker does not see this memory, when it would not be
        worth it, when space is short, and when it cannot be written.
        """
        nbytes = sum(batch.payload_bytes for batch in batches)
        capability = worker.capability
        if (
            capability is None
            or not self.namespace
            or capability.shm_namespace != self.namespace
            or nbytes < self.min_bytes
            or nbytes > _SHARE_OF_FREE * self._free()
        ):
            return None
        paths = [self._root / f"{_PREFIX}{self._owner}-{next(self._counter)}" for _ in batches]
        writing = asyncio.ensure_future(asyncio.to_thread(_write, paths, batches))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The thread goes on; what it writes must not stay, and how it fails is nothing.
            writing.add_done_callback(lambda done: done.cancelled() or done.exception())
            writing.add_done_callback(lambda _: _unlink(paths))
            raise
        except OSError as error:
            _unlink(paths)
            _log.warning("shm_failed", bytes=nbytes, why=error.strerror)
            return None
        handles = [
            common.ShmHandle(name=path.name, nbytes=batch.payload_bytes, owner_id=self._owner)
            for path, batch in zip(paths, batches, strict=True)
        ]
        return Segment(paths, handles)

    def _free(self) -> int:
        try:
            about = os.statvfs(self._root)
        except OSError:
            return 0  # it is no longer there
        return about.f_bavail * about.f_frsize

    def _sweep(self) -> None:
        """Removes the segments of routers whose lock nobody holds."""
        for lock in self._root.glob(f"{_PREFIX}*{_LOCK}"):
            owner = lock.name.removeprefix(_PREFIX).removesuffix(_LOCK)
            if owner == self._owner:
                continue
            try:
                held = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:
                continue  # gone meanwhile, or not ours to open
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass  # its router lives
            else:
                # A lock alone is what a router leaves that was killed between two requests.
                if segments := _remove_all(self._root, owner) - 1:
                    _log.info("shm_swept", segments=segments)
            finally:
                os.close(held)


def _locked(path: Path) -> int:
    # Under its name once it is held: a router that starts just now would take it for a dead one's.
    new = path.with_suffix(".new")
    lock = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(path)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_all(root: Path, owner: str) -> int:
    """Removes an owner's segments, and last its lock; returns how many files there were."""
    count = 0
    for path in (*root.glob(f"{_PREFIX}{owner}-*"), root / f"{_PREFIX}{owner}{_LOCK}"):
        _unlink([path])
        count += 1
    return count


def _write(paths: Sequence[Path], batches: Sequence[Batch]) -> None:
    for path, batch in zip(paths, batches, strict=True):
        # Workers may run as another user of the pod: read and remove is theirs by the folder.
        segment = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o644)
        try:
            for array in batch.payload:
                _write_all(segment, array.reshape(-1).view(np.uint8).data)
        finally:
            os.close(segment)


def _unlink(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            # Somebody else's now, or nobody may write there any more: no request depends on it.
            _log.warning("shm_failed", why=error.strerror)


def _write_all(segment: int, data: memoryview) -> None:
    while data:
        written = os.write(segment, data)
        data = data[written:]
