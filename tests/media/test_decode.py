"""Pixels are those of the workers' own loader, bit for bit."""

from __future__ import annotations

import pytest

from router.faults import Fault, Reason
from router.media.decode import decode_in_process as decode
from router.media.header import ImageFormat
from router.media.sniff import sniff
from tests.media.images import BAD, GOLDENS, GOOD, read, sha256

EVERY_FORMAT = frozenset(ImageFormat)
MAX_PIXELS = 178_956_970
REASONS = {
    "not an image": Reason.MEDIA_FORMAT_UNSUPPORTED,
    "unsupported format": Reason.MEDIA_FORMAT_UNSUPPORTED,
    "too many pixels": Reason.MEDIA_TOO_LARGE,
    "truncated": Reason.MEDIA_DECODE_FAILED,
}


@pytest.mark.parametrize("name", GOOD)
def test_pixels_equal_the_reference(name: str) -> None:
    data, golden = read(name), GOLDENS[name]
    header = sniff(data, max_pixels=MAX_PIXELS, index=0, formats=EVERY_FORMAT)
    assert (header.width, header.height) == (golden["width"], golden["height"])
    pixels = decode(data, header, 0)
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert pixels.shape == (golden["height"], golden["width"], 3)
    assert sha256(pixels) == golden["sha256"]


@pytest.mark.parametrize("name", BAD)
def test_damaged_and_foreign_files_are_refused_with_the_item_named(name: str) -> None:
    data = read(name)
    with pytest.raises(Fault) as caught:
        decode(data, sniff(data, max_pixels=MAX_PIXELS, index=3), 3)
    assert caught.value.reason is REASONS[GOLDENS[name]["class"]]
    assert caught.value.metadata["index"] == "3"
    assert "item 3" in caught.value.message
