"""Beyond the example files: whatever the reference makes of a file, we make of it too."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from router.faults import Fault, Reason
from router.media.decode import decode_in_process
from router.media.sniff import size_from_prefix, sniff
from tests.media import variants
from tests.media.reference import reference_pixels


@functools.cache
def files() -> list[tuple[str, bytes]]:
    return [
        *variants.written_by_pillow(),
        *variants.png_by_hand(),
        *variants.gif_by_hand(),
        *variants.bmp_by_hand(),
    ]


def test_there_are_many_variants() -> None:
    assert len(files()) > 600


@pytest.mark.filterwarnings("ignore:Image appears to be a malformed MPO")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "MPO"])
def test_pixels_and_size_equal_the_reference(kind: str) -> None:
    different, same = [], 0
    for name, data in files():
        if name.split()[0] != kind:
            continue
        try:
            expected = reference_pixels(data)
        except (OSError, SyntaxError, ValueError):
            with pytest.raises(Fault) as caught:
                decode_in_process(data, sniff(data, max_pixels=10**6, index=0), 0)
            assert caught.value.reason is Reason.MEDIA_DECODE_FAILED
            continue
        header = sniff(data, max_pixels=10**6, index=0)
        pixels = decode_in_process(data, header, 0)
        size = (expected.shape[1], expected.shape[0])
        if (
            not np.array_equal(pixels, expected)
            or (header.width, header.height) != size
            or size_from_prefix(data) != size
        ):
            different.append(name)
        else:
            same += 1
    assert different == []
    assert same > 0
