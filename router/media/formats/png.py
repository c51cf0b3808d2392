"""PNG and APNG: the chunks (W3C PNG, third edition)."""

from __future__ import annotations

import struct
import zlib

from router.media.formats import exif
from router.media.header import BadHeader, Colour, ImageFormat, ImageHeader, Truncated

# At the usual 8 KiB a data chunk this is a file of half a gigabyte.
_MAX_CHUNKS = 65536
_MAX_TEXT = 1024 * 1024
_XMP = b"XML:com.adobe.xmp\0"
# ImageMagick keeps EXIF as hexadecimal text.
_RAW_PROFILE = b"Raw profile type exif\0"
_COLOURS = {
    0: Colour.GREY,
    2: Colour.RGB,
    3: Colour.PALETTE,
    4: Colour.GREY,
    6: Colour.RGB,
}
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}


def read(data: bytes) -> ImageHeader:
    """Reads the header of a PNG file. Raises BadHeader."""
    if len(data) < 29:
        raise Truncated("no IHDR")
    if data[12:16] != b"IHDR":
        raise BadHeader("first chunk")
    width, height, depth, colour = struct.unpack_from(">LLBB", data, 16)
    if depth not in _DEPTHS.get(colour, ()):
        raise BadHeader("bit depth")
    transparent, animated = colour in (4, 6), False
    plain, bounded = _sound(data, 8, 13), True
    exif_block: bytes | None = None
    # Where the last of each begins and ends: there may be tens of thousands to unpack.
    raw_profile = xmp = (0, 0)
    at = 33
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            break
        length, kind = struct.unpack_from(">L4s", data, at)
        body = at + 8
        if body + length + 4 > len(data) or (
            kind != b"IDAT" and plain and not _sound(data, at, length)
        ):
            # OpenCV allocates whatever a chunk claims to hold: 3 GB for 2 kB of file.
            plain = False
        if kind == b"tRNS" and colour != 2:
            # The one transparent colour of an RGB picture is ignored, as the
            # workers ignore it.
            transparent = True
        elif kind == b"acTL":
            animated = True
        elif kind == b"eXIf":
            exif_block = data[body : body + length]
        elif kind == b"iTXt" and data.startswith(_XMP, body):
            xmp = body, body + min(length, _MAX_TEXT)
        elif kind in (b"tEXt", b"zTXt") and data.startswith(_RAW_PROFILE, body):
            raw_profile = body, body + min(length, _MAX_TEXT)
        elif kind == b"IEND":
            break
        at = body + length + 4
    else:
        bounded = False
    return ImageHeader(
        ImageFormat.PNG,
        width,
        height,
        orientation=exif.orientation(
            _raw_profile(data, *raw_profile) if exif_block is None else exif_block,
            _international(data, *xmp),
        ),
        has_alpha=transparent,
        bit_depth=depth,
        colour=_COLOURS[colour],
        animated=animated,
        plain=plain,
        bounded=bounded,
    )


def _sound(data: bytes, at: int, length: int) -> bool:
    """Whether a chunk's checksum is right; the reference insists, OpenCV does not."""
    end = at + 8 + length
    return zlib.crc32(memoryview(data)[at + 4 : end]).to_bytes(4, "big") == data[end : end + 4]


def _international(data: bytes, begin: int, end: int) -> bytes:
    """The text of an iTXt chunk with XMP; its language is not of interest."""
    text = data[begin + len(_XMP) : end]
    packed, rest = text[:1] == b"\1", text[2:].split(b"\0", 2)
    if len(rest) < 3:
        return b""
    return _inflate(rest[2]) if packed else rest[2]


def _raw_profile(data: bytes, begin: int, end: int) -> bytes:
    """The bytes of a profile, packed or not: a name, a length, then hexadecimal lines."""
    text = data[begin + len(_RAW_PROFILE) : end]
    if data[begin - 4 : begin] == b"zTXt":
        text = _inflate(text[1:])
    try:
        return bytes.fromhex("".join(text.decode("latin-1").split("\n")[3:]))
    except ValueError:
        return b""


def _inflate(packed: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(packed, _MAX_TEXT)
    except zlib.error:
        return b""
