"""How the C library's allocator deals with messages of tens of megabytes.

By default each is a mapping of its own: its pages are faulted in and cleared
for every request, which takes longer than the copy that fills them. Here they
come from the heap, and what is freed serves the next request.

By itself the allocator gives back only the heap's end, and one small block that
lives there holds everything before it. So a watcher looks how much memory is
free and yet resident, and has it given back, wherever it is, when it stays too
much: what is kept for longer is `KEPT` at most.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
# What may stay unused; beyond it memory goes back to the system.
KEPT = 256 << 20
# Threads would have arenas of their own, eight a processor: each keeps up to 64 MiB
# at its end, where no trim reaches, and what it has free serves no other thread.
_ARENAS = 1
_INTERVAL = 5.0
_SMAPS = Path("/proc/self/smaps")


@dataclass(frozen=True, slots=True)
class Allocator:
    """What the C library's heap can be asked for. Both calls block."""

    # Bytes that are free and resident; exact only from `KEPT` on.
    unused: Callable[[], int]
    # Gives back all of them. Holds the allocator's lock meanwhile, some 85 ms for
    # 1 GiB, and whoever allocates more than a kilobyte waits, the event loop too.
    trim: Callable[[], object]


def keep_freed_memory() -> bool:
    """Makes the heap keep what large blocks leave; False where the C library has no such knob.

    For a process that serves, early in its life, before it has threads; with
    `watch_freed_memory` later on.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False  # musl, or not a Linux at all
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: KEPT, _M_ARENA_MAX: _ARENAS}
    taken = [bool(mallopt(name, value)) for name, value in settings.items()]
    return all(taken)


def allocator() -> Allocator | None:
    """None where memory cannot be given back so: musl, macOS, glibc before 2.33."""
    try:
        library = ctypes.CDLL(None)
        mallinfo, malloc_trim = library.mallinfo2, library.malloc_trim
    except (AttributeError, OSError):
        return None
    if not _SMAPS.exists():
        return None
    mallinfo.argtypes, mallinfo.restype = (), _MallInfo
    malloc_trim.argtypes, malloc_trim.restype = (ctypes.c_size_t,), ctypes.c_int

    def unused() -> int:
        info = mallinfo()
        free = int(info.fordblks)
        if free <= KEPT:
            return free
        # What was given back counts as free for ever: only residency tells them apart.
        return max(0, min(free, _heap_resident() - int(info.uordblks)))

    return Allocator(unused, lambda: malloc_trim(0))


async def watch_freed_memory(memory: Allocator | None, *, interval: float = _INTERVAL) -> None:
    """Until cancelled, has memory given back when at two looks more than `KEPT` is unused.

    At one look it may be what a picture has just left and the next one takes.
    """
    much = False
    while memory is not None:
        try:
            # In threads, and without the interpreter lock.
            before, much = much, await asyncio.to_thread(memory.unused) > KEPT
            if before and much:
                await asyncio.to_thread(memory.trim)
                much = False
        except OSError:
            return
        await asyncio.sleep(interval)


def _heap_resident() -> int:
    total, inside = 0, False
    with _SMAPS.open("rb") as lines:
        for line in lines:
            first, *others = line.split()
            if first == b"Rss:" and inside:
                total += int(others[0]) * 1024
            elif not first.endswith(b":"):
                was, inside = inside, others[-1] == b"[heap]"
                if was and not inside:
                    break  # each further mapping costs a walk through its pages
    return total


class _MallInfo(ctypes.Structure):
    # struct mallinfo2 of malloc.h.
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]
