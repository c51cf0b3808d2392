"""What the bytes are and how large, from the header alone."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

import pytest
from PIL import Image

from router.faults import Fault, Reason
from router.media.decode import is_hard
from router.media.formats import exif, isobmff, png
from router.media.header import ImageFormat
from router.media.sniff import format_of, size_from_prefix, sniff
from tests.media.images import GOLDENS, GOOD, read

TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]

MAX_PIXELS = 178_956_970


def chunk(kind: bytes, body: bytes) -> bytes:
    """A sound chunk of a PNG."""
    return struct.pack(">L", len(body)) + kind + body + struct.pack(">L", zlib.crc32(kind + body))


def refused(data: bytes) -> Fault:
    with pytest.raises(Fault) as caught:
        sniff(data, max_pixels=MAX_PIXELS, index=6)
    assert caught.value.metadata["index"] == "6"
    return caught.value


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf<?xml version='1.0'?>\n<svg/>", "SVG"),
        (read("bad_heic_magic.heic"), "HEIC"),
        (read("photo_203x151.jp2"), "JPEG 2000"),
        (b"\xff\x4f\xff\x51" + bytes(40), "JPEG 2000"),
        (read("bad_postscript.eps"), "PostScript"),
        (b"%PDF-1.7", "PDF"),
        (b"<!DOCTYPE html><html>", "an HTML page"),
        (b"hello, world", "text"),
        (b"", "empty"),
        (b"RIFF\x10\0\0\0AVI LIST", "a RIFF file that is not WebP"),
        (b"\0\0\0\x1cftypisom\0\0\2\0isomiso2", "MP4 or QuickTime video"),
        (b"\x1a\x45\xdf\xa3\x9f", "WebM or Matroska video"),
        (b"\xff\x0a\xfa", "JPEG XL"),
        (b"\x00\x01\x02\x03", "of an unknown format"),
    ],
)
def test_what_is_not_decoded_is_named(data: bytes, name: str) -> None:
    fault = refused(data)
    assert fault.reason is Reason.MEDIA_FORMAT_UNSUPPORTED
    assert f"the data is {name};" in fault.message


def test_jpeg_2000_is_read_where_it_is_asked_for() -> None:
    data = read("photo_203x151.jp2")
    header = sniff(data, max_pixels=MAX_PIXELS, index=0, formats=frozenset(ImageFormat))
    assert (header.width, header.height) == (203, 151)
    assert is_hard(data, header)


@pytest.mark.parametrize("name", ["bad_header_32000x32000.jpg", "bad_header_20000x20000.png"])
def test_a_header_that_claims_too_many_pixels_is_refused_by_it(name: str) -> None:
    fault = refused(read(name))
    assert fault.reason is Reason.MEDIA_TOO_LARGE
    assert fault.metadata["limit"] == str(MAX_PIXELS)


def test_the_limit_itself_is_allowed() -> None:
    data = read("tiny_20x30.png")
    assert sniff(data, max_pixels=600, index=0).pixels == 600
    with pytest.raises(Fault):
        sniff(data, max_pixels=599, index=0)


@pytest.mark.parametrize("size", [((1 << 20) + 1, 1), (1, 1 << 24)])
def test_a_side_of_millions_is_refused_however_few_pixels_there_are(size: tuple[int, int]) -> None:
    data = bytearray(read("tiny_20x30.png"))
    data[16:24] = struct.pack(">LL", *size)
    fault = refused(bytes(data))
    assert fault.reason is Reason.MEDIA_TOO_LARGE
    assert fault.metadata["limit"] == str(1 << 20)
    assert size_from_prefix(bytes(data)) is None


@pytest.mark.parametrize("name", ["photo_640x480.jpg", "tiny_20x30.png", "solid_61x43.bmp"])
def test_a_size_of_nothing_is_refused(name: str) -> None:
    data = bytearray(read(name))
    at = {"p": data.find(b"\xff\xc0") + 5, "t": 16, "s": 18}[name[0]]
    data[at : at + 4] = bytes(4)
    assert refused(bytes(data)).reason is Reason.MEDIA_DECODE_FAILED


@pytest.mark.parametrize("name", [n for n in GOOD if not n.endswith((".tif", ".webp"))])
def test_four_kibibytes_tell_the_size(name: str) -> None:
    golden = GOLDENS[name]
    assert size_from_prefix(read(name)[:4096]) == (golden["width"], golden["height"])


@pytest.mark.parametrize("name", GOOD)
def test_every_shorter_prefix_gives_the_size_or_nothing(name: str) -> None:
    data = read(name)[:4096]
    golden = GOLDENS[name]
    sizes = {size_from_prefix(data[:end]) for end in range(0, len(data), 7)}
    # Without its EXIF block, which may come later, a turned picture is not known as one.
    assert sizes <= {
        None, (golden["width"], golden["height"]), (golden["height"], golden["width"])
    }  # fmt: skip


def test_a_thumbnail_inside_a_jpeg_is_not_taken_for_it() -> None:
    thumbnail = io.BytesIO()
    Image.new("RGB", (16, 12)).save(thumbnail, "JPEG")
    block = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + thumbnail.getvalue()
    data = read("photo_161x184_444.jpg")
    segment = b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block
    assert size_from_prefix(data[:2] + segment + data[2:]) == (161, 184)


def test_a_jpeg_of_very_many_scans_is_left_to_the_sandbox() -> None:
    data = read("progressive_203x151.jpg")
    header = sniff(data, max_pixels=MAX_PIXELS, index=0)
    assert header.many_scans
    assert not is_hard(data, header)
    assert is_hard(data + b"\xff\xda" * 100, header)
    plain = read("photo_640x480.jpg")
    assert not is_hard(plain + b"\xff\xda" * 100, sniff(plain, max_pixels=MAX_PIXELS, index=0))


def test_a_gif_of_very_many_small_blocks_is_left_to_the_sandbox() -> None:
    data = HOSTILE["GIF of blocks of blocks"]
    assert is_hard(data, sniff(data, max_pixels=MAX_PIXELS, index=0))


def test_a_jpeg_whose_exif_comes_in_very_many_pieces_is_left_to_the_sandbox() -> None:
    data = read("photo_640x480.jpg")
    piece = b"\xff\xe1\0\x0eExif\0\0" + bytes(6)
    few, many = (data[:2] + piece * count + data[2:] for count in (8, 1000))
    assert not is_hard(few, sniff(few, max_pixels=MAX_PIXELS, index=0))
    assert is_hard(many, sniff(many, max_pixels=MAX_PIXELS, index=0))


def test_of_many_packed_profiles_only_the_last_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked = []

    def inflate(packed: bytes) -> bytes:
        unpacked.append(packed)
        return zlib.decompress(packed)

    monkeypatch.setattr(png, "_inflate", inflate)

    def profile(orientation: int) -> bytes:
        block = b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0" + bytes([orientation, 0, 0, 0])
        text = b"\nexif\n%8d\n%s\n" % (len(block), block.hex().encode())
        return chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text))

    data = read("tiny_20x30.png")
    data = data[:33] + profile(3) * 50 + profile(6) + data[33:]
    assert sniff(data, max_pixels=MAX_PIXELS, index=0).orientation == 6
    assert len(unpacked) == 1


@pytest.mark.parametrize(("names", "orientation"), [(0, 6), (1, 6), (2, 6), (3, 1), (100_000, 1)])
def test_the_name_of_an_exif_block_may_stand_twice(names: int, orientation: int) -> None:
    block = b"II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0"
    assert exif.orientation(b"Exif\0\0" * names + block) == orientation


def test_an_avif_that_also_calls_itself_mif1_is_avif() -> None:
    data = read("photo_203x151.avif")
    assert format_of(data) is ImageFormat.AVIF
    assert b"avif" in isobmff.brands(data)


HOSTILE = {
    "JPEG of tiny segments": b"\xff\xd8\xff\xe0" + b"\0\2\xff\xe0" * 2_000_000,
    "JPEG of fill bytes": b"\xff\xd8\xff" + b"\xff" * 8_000_000,
    "JPEG of segments behind fill bytes": b"\xff\xd8" + (b"\xff" * 4000 + b"\xfe\0\2") * 2_000,
    "PNG of empty chunks": read("tiny_20x30.png")[:33] + b"\0\0\0\0abcd\0\0\0\0" * 600_000,
    "WebP of empty chunks": b"RIFF\xff\xff\xff\xffWEBPVP8X\x0a\0\0\0" + bytes(10)
    + b"JUNK\0\0\0\0" * 1_000_000,
    "GIF of empty blocks": b"GIF89a\1\0\1\0\0\0\0" + b"\x21\xfe\0" * 3_000_000,
    "GIF of blocks of blocks": b"GIF89a\1\0\1\0\0\0\0"
    + (b"\x21\xfe" + b"\1a" * 4000 + b"\0") * 500,
    "GIF of one endless block": b"GIF89a\1\0\1\0\0\0\0\x21\xfe" + b"\1a" * 4_000_000,
    "TIFF of a large directory": b"II*\0\x08\0\0\0\xff\xff" + b"\0\1\4\0\1\0\0\0\1\0\0\0" * 65535,
    "AVIF of empty boxes": b"\0\0\0\x18ftypavif\0\0\0\0avifmif1" + b"\0\0\0\x08free" * 1_000_000,
    "AVIF of many items": b"\0\0\0\x18ftypavif\0\0\0\0avifmif1\0\0\0\0meta\0\0\0\0"
    + b"\0\0\0\0iprp\0\0\0\0ipma" + bytes(4) + b"\xff" * 4_000_000,
    "text that never ends": b" " * 8_000_000,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_header_takes_long_to_read(name: str) -> None:
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> TraceFunction:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        sniff(HOSTILE[name], max_pixels=MAX_PIXELS, index=0)
    except Fault as fault:
        assert fault.reason in (Reason.MEDIA_DECODE_FAILED, Reason.MEDIA_FORMAT_UNSUPPORTED)
    finally:
        sys.settrace(before)
    # A walk over every one of the millions of parts would take several lines each.
    assert lines < 1_000_000
