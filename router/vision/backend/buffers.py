"""Recycled memory for large arrays.

A fresh 70 MB array costs more in page faults than the work that fills it, so
blocks are kept and handed out again once the last view of them is gone.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

_SMALLEST = 1 << 16


class BufferPool:
    """Hands out arrays; their memory comes back by itself when nobody holds them.

    At most `limit` bytes are kept idle. A block is a power of two or one and a
    half times one, so that similar pictures share it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: dict[int, deque[npt.NDArray[np.uint8]]] = {}
        self._idle_bytes = 0
        # Finalizers may run inside any allocation of this thread.
        self._lock = threading.RLock()

    @property
    def idle_bytes(self) -> int:
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

    def _take(self, size: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            blocks = self._idle.get(size)
            if blocks:
                self._idle_bytes -= size
                return blocks.pop()
        return np.empty(size, np.uint8)

    def _give(self, block: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            if self._idle_bytes + block.nbytes <= self._limit:
                self._idle_bytes += block.nbytes
                self._idle.setdefault(block.nbytes, deque()).append(block)


def _block_size(nbytes: int) -> int:
    size = _SMALLEST
    while size < nbytes:
        if size + size // 2 >= nbytes:
            return size + size // 2
        size *= 2
    return size
