"""JPEG 2000: the image header box, or the SIZ marker of a bare codestream."""

from __future__ import annotations

import struct

from router.media.header import BadHeader, Colour, ImageFormat, ImageHeader, Truncated

# The header box comes first, before the codestream.
_SEARCHED = 64 * 1024
# Grey and RGB; one component more is taken for alpha.
_OPAQUE = (1, 3)


def read(data: bytes) -> ImageHeader:
    """Reads the header of a JPEG 2000 file. Raises BadHeader."""
    if data.startswith(b"\xff\x4f\xff\x51"):
        if len(data) < 42:
            raise Truncated("no SIZ")
        right, bottom, left, top = struct.unpack_from(">LLLL", data, 8)
        if right <= left or bottom <= top:
            raise BadHeader("size")
        (components,) = struct.unpack_from(">H", data, 40)
        return _header(right - left, bottom - top, has_alpha=components not in _OPAQUE)
    at = data.find(b"ihdr", 12, _SEARCHED)
    if at < 0 or at + 14 > len(data):
        raise Truncated("no image header box")
    height, width, components = struct.unpack_from(">LLH", data, at + 4)
    # A palette's colours may have alpha of their own.
    palette = data.find(b"pclr", at, _SEARCHED) >= 0
    return _header(width, height, has_alpha=palette or components not in _OPAQUE)


def _header(width: int, height: int, *, has_alpha: bool) -> ImageHeader:
    return ImageHeader(
        ImageFormat.JPEG2000, width, height, has_alpha=has_alpha, colour=Colour.OTHER
    )
