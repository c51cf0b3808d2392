"""Markers where they do not belong: read as the reference reads them, or refused as it does."""

from __future__ import annotations

import io
import random
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from router.faults import Fault, Reason
from router.media.decode import Pixels
from router.media.decode import decode_in_process as decode
from router.media.formats import jpeg
from router.media.sniff import sniff
from tests.media.images import DATA, GOOD, read
from tests.media.reference import reference_pixels

# Tables, start and end of scans and pictures, restarts, application data, frames, comment.
MARKERS = (0xC4, 0xDA, 0xDB, 0xDD, 0xC0, 0xC2, 0xD0, 0xD3, 0xD8, 0xD9, 0xDC, 0xE1, 0xFE, 0x01, 0xFF)
PHOTOS = sorted(
    path.name for path in (DATA / "images").glob("photo_*.jpg") if path.stat().st_size < 300_000
)


def with_thumbnail(name: str) -> bytes:
    """The picture with a smaller JPEG, scan and all, in its EXIF block."""
    with Image.open(io.BytesIO(read(name))) as image:
        small = io.BytesIO()
        image.resize((64, 48)).save(small, "JPEG")
        # The offset of a TIFF block with one empty directory, and the JPEG behind it.
        exif = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + small.getvalue()
        out = io.BytesIO()
        image.save(out, "JPEG", quality=90, exif=exif)
    data = out.getvalue()
    assert data.count(b"\xff\xda") == 2
    return data


def scan_of(data: bytes) -> int:
    return sniff(data, max_pixels=20_000_000, index=0).scan_at


def read_or_refused(data: bytes) -> Pixels | None:
    try:
        return decode(data, sniff(data, max_pixels=20_000_000, index=0), 0)
    except Fault as fault:
        assert fault.reason is Reason.MEDIA_DECODE_FAILED
        return None


def is_as_the_reference(data: bytes) -> bool:
    pixels = read_or_refused(data)
    try:
        expected = reference_pixels(data)
    except Exception:  # Pillow raises whatever its parsing trips over
        return pixels is None
    return pixels is not None and np.array_equal(pixels, expected)


def with_marker(data: bytes, at: int, marker: int) -> bytes:
    return data[:at] + bytes((0xFF, marker)) + data[at:]


def odd_ones(data: bytes, places: int, seed: int) -> list[tuple[int, str]]:
    rng = random.Random(seed)
    scan = scan_of(data)
    tried = [
        (rng.randrange(scan, len(data) - 2), marker) for marker in MARKERS for _ in range(places)
    ]
    return [
        (at, f"{marker:02x}")
        for at, marker in tried
        if not is_as_the_reference(with_marker(data, at, marker))
    ]


@pytest.mark.parametrize("name", PHOTOS)
def test_a_marker_in_the_only_scan_is_for_the_reference_to_judge(name: str) -> None:
    assert odd_ones(read(name), 6, 1) == []


def test_a_marker_in_the_only_scan_behind_a_thumbnail_is_for_the_reference_to_judge() -> None:
    assert odd_ones(with_thumbnail("photo_640x480.jpg"), 6, 2) == []


def test_a_marker_in_a_scan_of_a_progressive_file_is_for_the_reference_to_judge() -> None:
    assert odd_ones(read("progressive_203x151.jpg"), 12, 3) == []


@pytest.mark.parametrize("marker", [0xC4, 0xDA])
def test_a_table_or_a_scan_inside_the_only_scan_is_refused(marker: int) -> None:
    data = read("photo_640x480.jpg")
    middle = (scan_of(data) + len(data)) // 2
    assert read_or_refused(with_marker(data, middle, marker)) is None


@pytest.mark.parametrize("marker", [m for m in MARKERS if m not in (0xFF, 0xD0, 0xD3, 0xD9)])
def test_in_the_only_scan_a_marker_is_irregular_even_behind_a_thumbnail(marker: int) -> None:
    data = with_thumbnail("photo_640x480.jpg")
    middle = (scan_of(data) + len(data)) // 2
    marked = with_marker(data, middle, marker)
    assert jpeg.is_regular(data, jpeg.read(data))
    assert not jpeg.is_regular(marked, jpeg.read(marked))


def test_a_file_of_many_scans_is_regular_with_its_tables_between_them() -> None:
    data = read("progressive_203x151.jpg")
    assert jpeg.is_regular(data, jpeg.read(data))


def test_opencv_decodes_no_jpeg() -> None:
    files = [read(name) for name in GOOD if name.endswith(".jpg")]
    files += [data[: len(data) - 2] for data in files] + [data[: len(data) // 2] for data in files]
    with patch("cv2.imdecode", side_effect=AssertionError("OpenCV was asked")):
        for data in files:
            read_or_refused(data)
