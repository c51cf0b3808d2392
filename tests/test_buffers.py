"""Memory that large arrays leave serves the next ones."""

from __future__ import annotations

import errno
import mmap
from collections import OrderedDict

import numpy as np
import pytest

from router.buffers import BufferPool

_U8 = np.dtype(np.uint8)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("nbytes", [1 << 17, (1 << 21) - 1, 1 << 21, 5 << 20])
def test_memory_comes_back_and_is_handed_out_again(nbytes: int) -> None:
    pool = BufferPool(64 << 20)
    first = pool.empty((nbytes,), _U8)
    first[:] = 7
    was = address(first)
    del first
    assert pool.idle_bytes >= nbytes
    again = pool.empty((nbytes - 5,), _U8)
    assert address(again) == was
    assert pool.idle_bytes == 0


def test_a_size_that_nobody_asks_for_any_more_gives_way() -> None:
    pool = BufferPool(8 << 20)
    old = [pool.empty((1 << 20,), _U8) for _ in range(8)]
    del old
    large = pool.empty((6 << 20,), _U8)
    was = address(large)
    del large
    assert pool.idle_bytes <= 8 << 20
    assert address(pool.empty((6 << 20,), _U8)) == was


def test_what_is_larger_than_the_limit_is_not_kept() -> None:
    pool = BufferPool(1 << 20)
    del (large := [pool.empty((3 << 20,), _U8)])[:]
    assert not large
    assert pool.idle_bytes == 0


def test_memory_may_come_back_while_other_is_taken() -> None:
    """As when the collector runs in the middle of it and finds an array in a cycle."""
    pool = BufferPool(3 << 20)
    taken = pool.empty((1 << 20,), _U8)
    held = [pool.empty((3 << 20,), _U8)]
    del taken

    class Interrupted(OrderedDict[int, list[np.ndarray]]):
        def move_to_end(self, key: int, last: bool = True) -> None:
            held.clear()
            super().move_to_end(key, last)

    pool._idle = Interrupted(pool._idle)
    again = pool.empty((1 << 20,), _U8)
    assert pool.idle_bytes == 3 << 20
    del again
    assert pool.idle_bytes <= 3 << 20


def test_a_kernel_without_huge_pages_gives_memory_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Plain(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    array = BufferPool(0).empty((4 << 20,), _U8)
    array[:] = 1
    assert int(array.sum()) == 4 << 20


def test_arrays_are_writeable_and_shaped() -> None:
    array = BufferPool(0).empty((300, 400, 3), np.dtype(np.float32))
    array[...] = 1.5
    assert array.shape == (300, 400, 3)
    assert array.flags.c_contiguous
    assert float(array.sum()) == 1.5 * 360_000
