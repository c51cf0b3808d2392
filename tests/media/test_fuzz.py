"""Thousands of damaged files: no decoder dies, hangs or grows, and none makes up pixels."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from router.faults import Fault, Reason
from router.media.decode import decode_in_process
from router.media.sandbox.process import DecoderProcess, SandboxFailed
from router.media.sandbox.protocol import Job, Kind
from router.media.sniff import size_from_prefix, sniff
from tests.media.images import GOOD, read
from tests.media.mutate import mutated
from tests.media.reference import reference_pixels

SMALL = [name for name in GOOD if len(read(name)) < 100_000]
REFUSALS = {Reason.MEDIA_DECODE_FAILED, Reason.MEDIA_FORMAT_UNSUPPORTED, Reason.MEDIA_TOO_LARGE}


def test_a_few_hundred_damaged_files_are_refused_or_read_alike_twice() -> None:
    rng = random.Random(7)
    for _ in range(300):
        data = mutated(read(rng.choice(SMALL)), rng)
        size_from_prefix(data[:4096])
        try:
            header = sniff(data, max_pixels=500_000, index=0)
            first = decode_in_process(data, header, 0)
        except Fault as fault:
            assert fault.reason in REFUSALS
            continue
        assert first.shape == (header.height, header.width, 3)
        assert np.array_equal(first, decode_in_process(data, header, 0))


def test_a_chunk_that_claims_gigabytes_does_not_get_them() -> None:
    data = bytearray(read("palette_trns_203x151.png")[:2000])
    data[33:37] = b"\xb5\0\0\0"
    header = sniff(bytes(data), max_pixels=500_000, index=0)
    assert not header.plain
    with pytest.raises(Fault) as caught:
        decode_in_process(bytes(data), header, 0)
    assert caught.value.reason is Reason.MEDIA_DECODE_FAILED


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_damaged_files_kill_hang_or_swell_no_decoder() -> None:
    rng = random.Random(11)
    process = DecoderProcess(memory=4 * 1024**3)
    process.start()
    outcomes: Counter[str] = Counter()
    grown: list[int] = []
    for round_ in range(6000):
        data = mutated(read(rng.choice(SMALL)), rng)
        try:
            header = sniff(data, max_pixels=500_000, index=0)
        except Fault:
            outcomes["refused by the header"] += 1
            continue
        try:
            shape = (header.height, header.width, 3)
            job = Job(Kind.IMAGE, len(data))
            pixels = process.call(job, data, timeout=60, shape=shape)[1]
        except SandboxFailed:
            outcomes["refused by the decoder"] += 1
        else:
            outcomes[_against_the_reference(data, pixels)] += 1
        if round_ % 1000 == 999:
            grown.append(_resident(process))
    process.stop()
    assert process.restarts == 0
    assert outcomes["other pixels than the reference"] == 0
    assert outcomes["read alike"] > 500
    # Fewer than one in a hundred: damage that the reference refuses and OpenCV does not notice.
    assert outcomes["read where the reference refuses"] < 60
    assert max(grown[1:]) < grown[0] + 64 * 1024 * 1024


def _against_the_reference(data: bytes, pixels: np.ndarray) -> str:
    try:
        expected = reference_pixels(data)
    except Exception:  # Pillow raises whatever its parsing trips over
        return "read where the reference refuses"
    return "read alike" if np.array_equal(pixels, expected) else "other pixels than the reference"


def _resident(process: DecoderProcess) -> int:
    assert process.pid is not None
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * 4096
