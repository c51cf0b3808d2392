"""Recycled memory for large arrays.

A fresh 70 MB array costs more in page faults than the work that fills it, so
blocks are kept and handed out again once the last view of them is gone.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import OrderedDict, deque
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

_SMALLEST = 1 << 16
# From here on a block is a mapping of its own, in huge pages where there are some.
_MAPPED = 1 << 21

Block = npt.NDArray[np.uint8]


class BufferPool:
    """Hands out arrays; their memory comes back by itself when nobody holds them.

    At most `limit` bytes are kept idle; sizes that nobody has asked for the
    longest are given up first. A block is a power of two or one and a half
    times one, so that similar pictures share it. Any thread may call.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # By size; the one that was used last stands last.
        self._idle: OrderedDict[int, list[Block]] = OrderedDict()
        self._idle_bytes = 0
        self._lock = threading.Lock()
        # What came back and is not among the idle yet: a finalizer may run inside any
        # allocation, also one of the thread that has the lock.
        self._returned: deque[Block] = deque()

    @property
    def idle_bytes(self) -> int:
        """Memory kept for the next arrays."""
        with self._lock:
            self._sort_in()
            return self._idle_bytes

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An uninitialised C-contiguous array."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < _SMALLEST:
            return np.empty(shape, dtype)
        size = _block_size(nbytes)
        block = self._take(size)
        array = np.frombuffer(block.data, dtype, prod(shape))
        # Every view of the array keeps this memoryview, and nothing else, alive.
        weakref.finalize(array.base, self._give, block).atexit = False
        return array.reshape(shape)

    def _take(self, size: int) -> Block:
        with self._lock:
            self._sort_in()
            blocks = self._idle.get(size)
            if blocks:
                self._idle.move_to_end(size)
                self._idle_bytes -= size
                return blocks.pop()
        return _fresh(size)

    def _give(self, block: Block) -> None:
        self._returned.append(block)
        # Where somebody has the lock, the next one who takes it sorts the block in.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._idle.setdefault(block.nbytes, []).append(block)
            self._idle.move_to_end(block.nbytes)
            self._idle_bytes += block.nbytes
            while self._idle_bytes > self._limit:
                size, blocks = next(iter(self._idle.items()))
                if blocks:
                    blocks.pop()
                    self._idle_bytes -= size
                if not blocks:
                    del self._idle[size]


# The process's own: pictures, what becomes of them, and scratch.
SHARED = BufferPool(256 << 20)


def _fresh(size: int) -> Block:
    if size < _MAPPED:
        return np.empty(size, np.uint8)
    # Not from the allocator, whose heap a block that is kept would cut in two.
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def _block_size(nbytes: int) -> int:
    size = _SMALLEST
    while size < nbytes:
        if size + size // 2 >= nbytes:
            return size + size // 2
        size *= 2
    return size
