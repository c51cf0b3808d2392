"""AVIF: the boxes of the primary item (ISO/IEC 14496-12, 23008-12)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from router.media.header import BadHeader, ImageFormat, ImageHeader, Truncated

_MAX_BOXES = 1024
# meta comes first and is small; what is longer is not looked at.
_MAX_META = 1024 * 1024
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"})
# Orientation that undoes `irot` (quarter turns anticlockwise) after `imir`.
_ORIENTATIONS = {
    (0, None): 1, (1, None): 8, (2, None): 3, (3, None): 6,
    (0, 0): 4, (1, 0): 5, (2, 0): 2, (3, 0): 7,
    (0, 1): 2, (1, 1): 7, (2, 1): 4, (3, 1): 5,
}  # fmt: skip


def brands(data: bytes) -> frozenset[bytes]:
    """The major and compatible brands; empty where the file starts otherwise."""
    if data[4:8] != b"ftyp":
        return frozenset()
    size = min(int.from_bytes(data[:4], "big"), 256)
    return frozenset(
        {data[8:12], *(data[at : at + 4] for at in range(16, min(size, len(data)) - 3, 4))}
    )


def is_heif(data: bytes) -> bool:
    """Whether the file is a still picture that is not AVIF: HEIC and its like."""
    return not _HEIF_BRANDS.isdisjoint(brands(data))


def read(data: bytes) -> ImageHeader:
    """Reads the header of an AVIF file. Raises BadHeader."""
    meta = next((body for kind, body in _boxes(data) if kind == b"meta"), None)
    if meta is None:
        raise Truncated("no meta box")
    children = dict(_boxes(meta[4:_MAX_META]))
    properties = dict(_boxes(children.get(b"iprp", b"")))
    containers = list(_boxes(properties.get(b"ipco", b"")))
    primary = _primary(children.get(b"pitm", b""))
    own = _associations(properties.get(b"ipma", b""), primary)
    chosen = dict(containers[i - 1] for i in own if 0 < i <= len(containers))
    size = chosen.get(b"ispe", b"")
    if len(size) < 12:
        raise BadHeader("no size")
    width, height = struct.unpack_from(">LL", size, 4)
    turns = chosen.get(b"irot", b"\0")[:1] or b"\0"
    axis = chosen.get(b"imir", b"")[:1]
    pixi = chosen.get(b"pixi", b"")
    return ImageHeader(
        ImageFormat.AVIF,
        width,
        height,
        orientation=_ORIENTATIONS[turns[0] & 3, axis[0] & 1 if axis else None],
        has_alpha=any(kind == b"auxC" and b"alpha" in body for kind, body in containers),
        bit_depth=pixi[5] if len(pixi) > 5 else 8,
        animated=b"avis" in brands(data),
    )


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    for _ in range(_MAX_BOXES):
        if at + 8 > len(data):
            return
        size, kind = struct.unpack_from(">L4s", data, at)
        head = 8
        if size == 1 and at + 16 <= len(data):
            size, head = struct.unpack_from(">Q", data, at + 8)[0], 16
        end = len(data) if size == 0 else at + size
        if end < at + head:
            raise BadHeader("box size")
        yield kind, data[at + head : min(end, at + head + _MAX_META)]
        at = end


def _primary(pitm: bytes) -> int:
    wide = pitm[:1] != b"\0"
    return int.from_bytes(pitm[4 : 8 if wide else 6], "big")


def _associations(ipma: bytes, wanted: int) -> list[int]:
    """The 1-based indices of one item's properties."""
    try:
        version, wide, count = ipma[0], ipma[3] & 1, int.from_bytes(ipma[4:8], "big")
        at = 8
        for _ in range(min(count, _MAX_BOXES)):
            width = 4 if version else 2
            item = int.from_bytes(ipma[at : at + width], "big")
            at += width + 1
            step, mask = (2, 0x7FFF) if wide else (1, 0x7F)
            end = at + ipma[at - 1] * step
            if item == wanted:
                return [
                    int.from_bytes(ipma[p : p + step], "big") & mask for p in range(at, end, step)
                ]
            at = end
    except IndexError:
        return []
    return []
