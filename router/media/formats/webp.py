"""WebP: the RIFF container and its three bitstreams (RFC 9649)."""

from __future__ import annotations

from router.media.formats import exif
from router.media.header import BadHeader, ImageFormat, ImageHeader, Truncated

_MAX_CHUNKS = 65536


def read(data: bytes) -> ImageHeader:
    """Reads the header of a WebP file. Raises BadHeader."""
    if len(data) < 30:
        raise Truncated("no first chunk")
    kind = data[12:16]
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise BadHeader("start code")
        return ImageHeader(
            ImageFormat.WEBP, _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF
        )
    if kind == b"VP8L":
        if data[20] != 0x2F:
            raise BadHeader("signature")
        bits = _little(data, 21, 4)
        return ImageHeader(
            ImageFormat.WEBP,
            (bits & 0x3FFF) + 1,
            (bits >> 14 & 0x3FFF) + 1,
            has_alpha=bool(bits >> 28 & 1),
        )
    if kind != b"VP8X":
        raise BadHeader("first chunk")
    flags = data[20]
    exif_block, xmp, bounded = _metadata(data)
    return ImageHeader(
        ImageFormat.WEBP,
        _little(data, 24, 3) + 1,
        _little(data, 27, 3) + 1,
        orientation=exif.orientation(exif_block, xmp),
        has_alpha=bool(flags & 0x10),
        animated=bool(flags & 0x02),
        # The reference reads the container, OpenCV the first picture in it.
        plain=False,
        bounded=bounded,
    )


def _metadata(data: bytes) -> tuple[bytes | None, bytes | None, bool]:
    """The EXIF and XMP chunks, and whether all chunks were seen."""
    exif_block: bytes | None = None
    xmp: bytes | None = None
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            break
        kind, length = data[at : at + 4], _little(data, at + 4, 4)
        if kind == b"EXIF" and exif_block is None:
            exif_block = data[at + 8 : at + 8 + length]
        elif kind == b"XMP " and xmp is None:
            xmp = data[at + 8 : at + 8 + length]
        at += 8 + length + (length & 1)
    else:
        return exif_block, xmp, False
    return exif_block, xmp, True


def _little(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")
