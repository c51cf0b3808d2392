"""Compiled loops, ready before a request needs them.

Compiling holds the interpreter's lock for most of a minute: health checks and
streams would stand still. So it is done by a process of its own, which leaves
its work in numba's cache on disk; what this process then does is read it.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path

import numba
from llvmlite import binding

from router.observe.logging import get_logger
from router.vision.backend import cpu, loops
from router.vision.backend.cpu import CpuBackend

_log = get_logger("app")

_ROOMS = ("vision/backend", "prefix")


def compile_all() -> None:
    """Compiles, or reads from the cache, every loop of the CPU; leaves word of it."""
    from router.prefix.warm import compile_ahead

    CpuBackend().warm_up()
    compile_ahead()
    marker = _marker()
    if marker is not None:
        marker.touch()


def are_cached() -> bool:
    """Whether the cache holds the loops as they stand, for this processor."""
    marker = _marker()
    return marker is not None and marker.exists()


async def compile_apart(stop: asyncio.Event) -> None:
    """Fills the cache in a process of its own, unless it is filled; gives up when `stop` is set.

    A failure is told and nothing more: the loops are then compiled here.
    """
    if are_cached():
        return
    _log.info("compiling_kernels", why="first start with this version on this machine")
    # Not by the event loop, which forks: gRPC's threads do not survive that in a child.
    try:
        process = subprocess.Popen(  # noqa: ASYNC220 - a moment, at start
            [sys.executable, "-m", "router.kernels"], stdout=subprocess.DEVNULL
        )
    except OSError as error:
        _log.warning("kernels_not_cached", why=error.strerror)
        return
    stopped = asyncio.create_task(stop.wait())
    ended = asyncio.create_task(asyncio.to_thread(process.wait))
    try:
        await asyncio.wait([stopped, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and process.returncode:
            _log.warning("kernels_not_cached", exit_code=process.returncode)
    finally:
        stopped.cancel()
        process.kill()  # nothing, if it has ended
        await ended


def _marker() -> Path | None:
    """The file that says that the cache is filled; None where there is no cache."""
    folder = getattr(loops.resize_lines, "_cache", None)
    path = getattr(folder, "cache_path", None)
    return Path(path) / f"mmrouter-{_version()}.compiled" if path else None


def _version() -> str:
    """Changes with the loops' sources, numba, and the processor."""
    digest = hashlib.sha256()
    root = Path(cpu.__file__).resolve().parents[2]
    for room in _ROOMS:
        for source in sorted((root / room).glob("*.py")):
            digest.update(source.read_bytes())
    about = f"{numba.__version__} {binding.get_host_cpu_name()} {sys.version_info[:2]}"
    digest.update(about.encode())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    compile_all()
