"""TIFF 6.0 and BigTIFF: the first directory."""

from __future__ import annotations

import struct

from router.media.header import BadHeader, Colour, ImageFormat, ImageHeader, Truncated

_MAX_ENTRIES = 4096
_WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _ORIENTATION = 256, 257, 258, 262, 274
_SAMPLES, _EXTRA = 277, 338
_WANTED = frozenset({_WIDTH, _HEIGHT, _BITS, _PHOTOMETRIC, _ORIENTATION, _SAMPLES, _EXTRA})
_UNSIGNED = {1: "B", 3: "H", 4: "L", 16: "Q"}
_COLOURS = {0: Colour.GREY, 1: Colour.GREY, 2: Colour.RGB, 3: Colour.PALETTE, 5: Colour.CMYK}


def read(data: bytes) -> ImageHeader:
    """Reads the first directory of a TIFF file. Raises BadHeader."""
    tags = _first_values(data)
    if _WIDTH not in tags or _HEIGHT not in tags:
        raise BadHeader("no size")
    orientation = tags.get(_ORIENTATION, 1)
    return ImageHeader(
        ImageFormat.TIFF,
        tags[_WIDTH],
        tags[_HEIGHT],
        orientation=orientation if 1 <= orientation <= 8 else 1,
        has_alpha=_has_alpha(tags),
        bit_depth=tags.get(_BITS, 1),
        colour=_COLOURS.get(tags.get(_PHOTOMETRIC, -1), Colour.OTHER),
    )


def _has_alpha(tags: dict[int, int]) -> bool:
    if _EXTRA in tags:
        return tags[_EXTRA] in (1, 2, 999)  # the last is CorelDRAW's
    # The reference takes a fourth sample beside three colours for alpha.
    return tags.get(_PHOTOMETRIC) == 2 and tags.get(_SAMPLES, 1) > 3


def _first_values(data: bytes) -> dict[int, int]:
    """The first value of each wanted tag that is an unsigned number."""
    order = "<" if data[:2] == b"II" else ">"
    try:
        big = struct.unpack_from(order + "H", data, 2)[0] == 43
        offset: int = struct.unpack_from(order + ("Q" if big else "L"), data, 8 if big else 4)[0]
        count: int = struct.unpack_from(order + ("Q" if big else "H"), data, offset)[0]
        entries = offset + (8 if big else 2)
        stride, inline = (20, 8) if big else (12, 4)
        tags: dict[int, int] = {}
        for at in range(entries, entries + stride * min(count, _MAX_ENTRIES), stride):
            tag, kind = struct.unpack_from(order + "HH", data, at)
            if tag not in _WANTED or kind not in _UNSIGNED:
                continue
            values: int = struct.unpack_from(order + ("Q" if big else "L"), data, at + 4)[0]
            where = at + stride - inline
            if values * struct.calcsize(order + _UNSIGNED[kind]) > inline:
                where = struct.unpack_from(order + ("Q" if big else "L"), data, where)[0]
            if tag not in tags:
                tags[tag] = struct.unpack_from(order + _UNSIGNED[kind], data, where)[0]
    except (struct.error, OverflowError) as error:
        raise Truncated("directory") from error
    return tags
