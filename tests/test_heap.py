"""Large messages reuse the memory of those before them."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

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

glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="not the GNU C library"
)


def faults_of_a_message(how: str) -> int:
    command = [sys.executable, "-c", _MESSAGES, how]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return int(done.stdout)


@glibc
def test_a_large_message_takes_the_pages_of_the_one_before() -> None:
    assert faults_of_a_message("kept") < 100 < faults_of_a_message("plain")
