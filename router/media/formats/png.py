"""PNG and APNG: the chunks (W3C PNG, third edition)."""

from __future__ import annotations

import struct

from router.media.formats import exif
from router.media.header import BadHeader, Colour, ImageFormat, ImageHeader, Truncated

# At the usual 8 KiB a data chunk this is a file of half a gigabyte.
_MAX_CHUNKS = 65536
_MAX_TEXT = 1024 * 1024
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
    exif_block: bytes | None = None
    xmp: bytes | None = None
    at = 33
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            break
        length, kind = struct.unpack_from(">L4s", data, at)
        body = at + 8
        if kind == b"tRNS" and colour != 2:
            # The one transparent colour of an RGB picture is ignored, as the
            # workers ignore it.
            transparent = True
        elif kind == b"acTL":
            animated = True
        elif kind == b"eXIf":
            exif_block = data[body : body + length]
        elif kind == b"iTXt" and data.startswith(b"XML:com.adobe.xmp\0", body):
            xmp = data[body : body + min(length, _MAX_TEXT)]
        elif kind == b"IEND":
            break
        at = body + length + 4
    return ImageHeader(
        ImageFormat.PNG,
        width,
        height,
        orientation=exif.orientation(exif_block, xmp),
        has_alpha=transparent,
        bit_depth=depth,
        colour=_COLOURS[colour],
        animated=animated,
    )
