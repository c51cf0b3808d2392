"""How the C library's allocator deals with messages of tens of megabytes.

By default each is a mapping of its own: its pages are faulted in and cleared
for every request, which takes longer than the copy that fills them. Here they
come from the heap, and what is freed serves the next request.
"""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
# What may stay at the heap's end unused; beyond it memory goes back to the system.
_KEPT = 256 << 20


def keep_freed_memory() -> bool:
    """Makes the heap keep what large blocks leave; False where the C library has no such knob.

    For a process that serves, early in its life.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False  # musl, or not a Linux at all
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT))
