"""BMP: the file header and the bitmap header behind it."""

from __future__ import annotations

import struct

from router.media.header import BadHeader, Colour, ImageFormat, ImageHeader, Truncated


def read(data: bytes) -> ImageHeader:
    """Reads the header of a BMP file. Raises BadHeader."""
    if len(data) < 30:
        raise Truncated("no bitmap header")
    (size,) = struct.unpack_from("<L", data, 14)
    if size == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
    elif size >= 40:
        width, height, _, bits = struct.unpack_from("<llHH", data, 18)
    else:
        raise BadHeader("bitmap header")
    # A negative height means that the rows go from the top down.
    width, height = abs(width), abs(height)
    return ImageHeader(
        ImageFormat.BMP,
        width,
        height,
        has_alpha=bits == 32,
        colour=Colour.PALETTE if bits <= 8 else Colour.RGB,
    )
