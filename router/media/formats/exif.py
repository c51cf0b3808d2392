"""The orientation of a picture, from EXIF or, failing that, from XMP.

The order and the leniency are those of Pillow's `ImageOps.exif_transpose`,
which the workers use: XMP counts only where EXIF has no orientation.
"""

from __future__ import annotations

import re
import struct

_ORIENTATION = 0x0112
# Numbers; a BYTE is raw data to Pillow.
_NUMBERS = {3: "H", 4: "L", 6: "b", 8: "h", 9: "l"}
_MAX_ENTRIES = 1024
_NAME = b"Exif\0\0"
_MAX_XMP = 1024 * 1024
_XMP = re.compile(rb'tiff:Orientation(="|>)([0-9])')


def orientation(exif: bytes | None, xmp: bytes | None = None) -> int:
    """1 to 8; 1 where nothing usable is said."""
    value = _from_exif(exif) if exif else None
    if value is None and xmp and (match := _XMP.search(xmp[:_MAX_XMP])):
        value = int(match[2])
    return value if value is not None and 1 <= value <= 8 else 1


def _from_exif(exif: bytes) -> int | None:
    # Twice at most: whoever repeats it a million times has a copy made for each.
    exif = exif.removeprefix(_NAME).removeprefix(_NAME)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None or len(exif) < 10:
        return None
    (offset,) = struct.unpack_from(order + "L", exif, 4)
    if offset + 2 > len(exif):
        return None
    (count,) = struct.unpack_from(order + "H", exif, offset)
    for entry in range(offset + 2, offset + 2 + 12 * min(count, _MAX_ENTRIES), 12):
        if entry + 12 > len(exif):
            return None
        tag, kind, length = struct.unpack_from(order + "HHL", exif, entry)
        if tag == _ORIENTATION and length == 1 and kind in _NUMBERS:
            value: int = struct.unpack_from(order + _NUMBERS[kind], exif, entry + 8)[0]
            return value
    return None
