"""GIF: the logical screen and the blocks up to the first picture (GIF89a)."""

from __future__ import annotations

import struct

from router.media.header import Colour, ImageFormat, ImageHeader, Truncated

_MAX_BLOCKS = 4096
# Of all blocks together; the reference copies a comment's text once for each.
_MAX_SUB_BLOCKS = 4096


def read(data: bytes) -> ImageHeader:
    """Reads the header of a GIF file. Raises BadHeader.

    `animated` is never set: it would take a walk through all the pictures, and
    the first one is decoded in any case.
    """
    if len(data) < 13:
        raise Truncated("no screen descriptor")
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _table(flags)
    transparent, bounded, left_over = False, True, _MAX_SUB_BLOCKS
    for _ in range(_MAX_BLOCKS):
        kind = data[at : at + 1]
        if kind == b"\x2c" and at + 10 <= len(data):
            left, top, inner_width, inner_height = struct.unpack_from("<HHHH", data, at + 1)
            # A first picture that sticks out of the screen widens the canvas.
            width, height = max(width, left + inner_width), max(height, top + inner_height)
            break
        if kind != b"\x21":
            break
        if data[at + 1 : at + 2] == b"\xf9" and at + 4 <= len(data):
            transparent = bool(data[at + 3] & 1)
        at, left_over = _after_sub_blocks(data, at + 2, left_over)
        if left_over == 0:
            bounded = False
            break
    else:
        bounded = False
    return ImageHeader(
        ImageFormat.GIF,
        width,
        height,
        has_alpha=transparent,
        colour=Colour.PALETTE,
        bounded=bounded,
    )


def _table(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_sub_blocks(data: bytes, at: int, most: int) -> tuple[int, int]:
    """The offset behind a chain of sub-blocks, and how many of `most` are left.

    None are left where the end of the chain was not seen.
    """
    for left in range(most, 0, -1):
        if at >= len(data):
            return at, left
        size = data[at]
        at += 1 + size
        if size == 0:
            return at, left
    return at, 0
