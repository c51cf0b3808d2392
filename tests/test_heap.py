"""Large messages reuse the memory of those before them."""

from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys

import pytest

from router.heap import KEPT, Allocator, allocator, watch_freed_memory

# Each message has 64 MiB, or 16384 pages; after the first there is memory to use again.
_MESSAGES = """
import resource, sys
from router.heap import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
piece = b"x" * (64 << 20)
faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    message = b"".join((piece, b"y"))
    del message
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""

# 300 MiB in five messages; what lives after each holds the heap's end.
_PINNED = """
import asyncio
from router.heap import allocator, keep_freed_memory, watch_freed_memory

def resident():
    with open("/proc/self/statm") as statm:
        pages, shared = map(int, statm.read().split()[1:3])
    return (pages - shared) * 4096 >> 20

async def main():
    memory = allocator()
    before = resident()
    messages, live = [], []
    for _ in range(5):
        messages.append(b"x" * (60 << 20))
        live.append(b"y" * 5000)
    del messages
    freed = resident()
    watcher = asyncio.create_task(watch_freed_memory(memory, interval=0.01))
    async with asyncio.timeout(50):
        while resident() > before + 100:
            await asyncio.sleep(0.01)
    watcher.cancel()
    print(freed - before, resident() - before, memory.unused() >> 20)

assert keep_freed_memory()
asyncio.run(main())
"""

# Six threads at a time, each with a message that an arena of its own would have room for.
_THREADS = """
import threading
from router.heap import allocator, keep_freed_memory

def resident():
    with open("/proc/self/statm") as statm:
        pages, shared = map(int, statm.read().split()[1:3])
    return (pages - shared) * 4096 >> 20

def use():
    together.wait()
    message = b"x" * (50 << 20)
    together.wait()
    del message
    together.wait()
    together.wait()

assert keep_freed_memory()
before = resident()
together = threading.Barrier(7)
threads = [threading.Thread(target=use) for _ in range(6)]
for thread in threads:
    thread.start()
for _ in range(3):
    together.wait()
allocator().trim()
print(resident() - before)
together.wait()
"""

glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="not the GNU C library"
)


can_trim = pytest.mark.skipif(allocator() is None, reason="no malloc_trim, or nothing to see of it")


def numbers_of(program: str, *arguments: str) -> list[int]:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return [int(number) for number in done.stdout.split()]


def faults_of_a_message(how: str) -> int:
    (faults,) = numbers_of(_MESSAGES, how)
    return faults


@glibc
def test_a_large_message_takes_the_pages_of_the_one_before() -> None:
    assert faults_of_a_message("kept") < 100 < faults_of_a_message("plain")


@can_trim
def test_freed_memory_below_what_lives_goes_back_to_the_system() -> None:
    freed, kept, unused = numbers_of(_PINNED)
    assert freed > 290  # it does stay, or there would be nothing to watch
    assert kept < 100
    assert unused == 0  # though the allocator counts it as free, there is nothing left to trim


@can_trim
def test_freed_memory_of_threads_can_be_given_back() -> None:
    (kept,) = numbers_of(_THREADS)
    assert kept < 100


class Looks:
    """An allocator that says what it is told to, then stops its watcher."""

    def __init__(self, *unused: int) -> None:
        self._unused = list(unused)
        # After how many looks it was trimmed.
        self.trims: list[int] = []
        self._seen = 0

    def look(self) -> int:
        if self._seen == len(self._unused):
            raise OSError("no more to see")
        self._seen += 1
        return self._unused[self._seen - 1]

    def trim(self) -> None:
        self.trims.append(self._seen)

    async def watched(self) -> list[int]:
        await watch_freed_memory(Allocator(self.look, self.trim), interval=0)
        return self.trims


async def test_memory_is_given_back_at_the_second_look_that_finds_too_much() -> None:
    assert await Looks(0, KEPT + 1, KEPT + 1, 0, 0).watched() == [3]


async def test_memory_that_is_taken_again_between_looks_stays() -> None:
    assert await Looks(KEPT + 1, KEPT, KEPT + 1, 0, KEPT + 1).watched() == []


async def test_after_memory_was_given_back_two_more_looks_are_needed() -> None:
    assert await Looks(*[KEPT + 1] * 5).watched() == [2, 4]


async def test_without_such_an_allocator_nobody_watches() -> None:
    async with asyncio.timeout(10):
        await watch_freed_memory(None)
