"""JPEG 2000: the image header box, or the SIZ marker of a bare codestream."""

from __future__ import annotations

import struct

from router.media.header import BadHeader, Colour, ImageFormat, ImageHeader, Truncated

# The header box comes first, before the codestream.
_SEARCHED = 64 * 1024


def read(data: bytes) -> ImageHeader:
    """Reads the header of a JPEG 2000 file. Raises BadHeader."""
    if data.startswith(b"\xff\x4f\xff\x51"):
        if len(data) < 24:
            raise Truncated("no SIZ")
        right, bottom, left, top = struct.unpack_from(">LLLL", data, 8)
        if right <= left or bottom <= top:
            raise BadHeader("size")
        return ImageHeader(ImageFormat.JPEG2000, right - left, bottom - top, colour=Colour.OTHER)
    at = data.find(b"ihdr", 12, _SEARCHED)
    if at < 0 or at + 12 > len(data):
        raise Truncated("no image header box")
    height, width = struct.unpack_from(">LL", data, at + 4)
    return ImageHeader(ImageFormat.JPEG2000, width, height, colour=Colour.OTHER)
