"""Pixels are those of the workers' own loader, bit for bit."""

from __future__ import annotations

import io
import random
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from router.faults import Fault, Reason
from router.media.decode import Empty
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


def dirty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Memory that another picture was in."""
    array = np.empty(shape, dtype)
    array.fill(77)
    return array


@pytest.mark.parametrize("name", GOOD)
def test_pixels_do_not_depend_on_what_was_in_the_memory_before(name: str) -> None:
    data = read(name)
    header = sniff(data, max_pixels=MAX_PIXELS, index=0, formats=EVERY_FORMAT)
    assert sha256(decode(data, header, 0, empty=dirty)) == GOLDENS[name]["sha256"]


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_jpeg_shows_nothing_of_another_picture(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(read("photo_640x480.jpg"))
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(2, len(data))] = rng.randrange(256)
    if rng.random() < 0.3:
        del data[rng.randrange(600, len(data)) :]

    def outcome(empty: Empty) -> str:
        try:
            header = sniff(bytes(data), max_pixels=MAX_PIXELS, index=0)
            return sha256(decode(bytes(data), header, 0, empty=empty))
        except Fault as fault:
            return fault.reason.name

    assert outcome(dirty) == outcome(np.zeros)


def test_a_plain_jpeg_is_decoded_into_the_memory_that_is_given() -> None:
    data, given = read("photo_640x480.jpg"), []

    def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        given.append(np.empty(shape, dtype))
        return given[-1]

    pixels = decode(data, sniff(data, max_pixels=MAX_PIXELS, index=0), 0, empty=empty)
    assert np.shares_memory(pixels, given[0])


@pytest.mark.parametrize("name", GOOD)
def test_a_background_shows_through_where_a_picture_is_transparent_and_nowhere_else(
    name: str,
) -> None:
    data = read(name)
    header = sniff(data, max_pixels=MAX_PIXELS, index=0, formats=EVERY_FORMAT)
    with Image.open(io.BytesIO(data)) as opened:
        picture = ImageOps.exif_transpose(opened)
        blended = picture.has_transparency_data and picture.mode != "RGB"
        expected = picture.convert("RGBA" if blended else "RGB")
        if blended:
            below = Image.new("RGB", expected.size, (16, 32, 48))
            below.paste(expected, mask=expected.getchannel("A"))
            expected = below
    pixels = decode(data, header, 0, background=(16, 32, 48))
    if picture.mode != "I;16":  # Pillow converts it otherwise than the workers' loader
        assert np.array_equal(pixels, np.asarray(expected))
    if not np.array_equal(pixels, decode(data, header, 0)):
        assert header.has_alpha, "identities go by it"


def written(mode: str, kind: str, **options: Any) -> bytes:
    encoded = io.BytesIO()
    picture = Image.new("RGBA", (16, 12), (200, 60, 20, 100)).convert(mode)
    picture.save(encoded, kind, **options)
    return encoded.getvalue()


def retagged(tiff: bytes, tag: int, as_tag: int, value: int) -> bytes:
    """A little-endian TIFF, one of whose tags has become another of one short number."""
    data = bytearray(tiff)
    (directory,) = struct.unpack_from("<L", data, 4)
    (count,) = struct.unpack_from("<H", data, directory)
    entries = range(directory + 2, directory + 2 + 12 * count, 12)
    (at,) = (e for e in entries if struct.unpack_from("<H", data, e)[0] == tag)
    struct.pack_into("<HHLL", data, at, as_tag, 3, 1, value)
    return bytes(data)


TRANSPARENT = {
    "JP2": written("RGBA", "JPEG2000"),
    "JP2 grey": written("LA", "JPEG2000"),
    "bare JPEG 2000": written("RGBA", "JPEG2000", no_jp2=True),
    "TIFF of CorelDRAW": retagged(written("RGBA", "TIFF"), 338, 338, 999),
    "TIFF that does not say so": retagged(written("RGBA", "TIFF"), 338, 65000, 0),
}
OPAQUE = {
    "JP2": written("RGB", "JPEG2000"),
    "JP2 grey": written("L", "JPEG2000"),
    "bare JPEG 2000": written("RGB", "JPEG2000", no_jp2=True),
    "TIFF": written("RGB", "TIFF"),
}


@pytest.mark.parametrize(
    ("data", "transparent"),
    [pytest.param(data, True, id=name) for name, data in TRANSPARENT.items()]
    + [pytest.param(data, False, id=name) for name, data in OPAQUE.items()],
)
def test_a_header_tells_of_the_transparency_that_identities_go_by(
    data: bytes, transparent: bool
) -> None:
    header = sniff(data, max_pixels=MAX_PIXELS, index=0, formats=EVERY_FORMAT)
    white, black = (decode(data, header, 0, background=(c, c, c)) for c in (255, 0))
    assert (not np.array_equal(white, black)) is transparent
    assert header.has_alpha is transparent
