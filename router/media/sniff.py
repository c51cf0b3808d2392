"""What the bytes are, and how large the picture is, before a decoder sees them.

A file of 631 bytes may claim 32000 x 32000 pixels and make a decoder work ten
seconds and take six gigabytes; reading its header takes microseconds. The kind
is judged by the first bytes alone, never by a name or a Content-Type.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from router.faults import Fault, Reason
from router.media.formats import bmp, gif, isobmff, jpeg, jpeg2000, png, tiff, webp
from router.media.header import BadHeader, ImageFormat, ImageHeader
from router.media.limits import DEFAULT_FORMATS

# The weights of a resize take hundreds of bytes for each pixel of a side, and a side of many
# millions fits into a small file. OpenCV stops here as well.
_MAX_SIDE = 1 << 20

_READERS: dict[ImageFormat, Callable[[bytes], ImageHeader]] = {
    ImageFormat.JPEG: jpeg.read,
    ImageFormat.PNG: png.read,
    ImageFormat.WEBP: webp.read,
    ImageFormat.GIF: gif.read,
    ImageFormat.BMP: bmp.read,
    ImageFormat.TIFF: tiff.read,
    ImageFormat.AVIF: isobmff.read,
    ImageFormat.JPEG2000: jpeg2000.read,
}
_MAGIC: tuple[tuple[bytes, ImageFormat], ...] = (
    (b"\xff\xd8\xff", ImageFormat.JPEG),
    (b"\x89PNG\r\n\x1a\n", ImageFormat.PNG),
    (b"GIF87a", ImageFormat.GIF),
    (b"GIF89a", ImageFormat.GIF),
    (b"II*\0", ImageFormat.TIFF),
    (b"MM\0*", ImageFormat.TIFF),
    (b"II+\0", ImageFormat.TIFF),
    (b"MM\0+", ImageFormat.TIFF),
    (b"\0\0\0\x0cjP  \r\n\x87\n", ImageFormat.JPEG2000),
    (b"\xff\x4f\xff\x51", ImageFormat.JPEG2000),
    (b"BM", ImageFormat.BMP),
)
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"%PDF", "PDF"),
    (b"8BPS", "Photoshop"),
    (b"\0\0\1\0", "an icon"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"v/1\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"qoif", "QOI"),
    (b"\x1a\x45\xdf\xa3", "WebM or Matroska video"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip"),
    (b"RIFF", "a RIFF file that is not WebP"),
    (b"OggS", "Ogg"),
    (b"ID3", "audio"),
)


def sniff(
    data: bytes,
    *,
    max_pixels: int,
    index: int,
    formats: Collection[ImageFormat] = DEFAULT_FORMATS,
) -> ImageHeader:
    """Reads the header of an image file.

    Raises Fault MEDIA_FORMAT_UNSUPPORTED for what is not one of `formats`,
    MEDIA_DECODE_FAILED for a header that makes no sense, and MEDIA_TOO_LARGE
    for more than `max_pixels`.
    """
    kind = format_of(data)
    if kind is None or kind not in formats:
        name = kind.value if kind else foreign_name(data)
        raise Fault.of_item(
            Reason.MEDIA_FORMAT_UNSUPPORTED,
            index,
            f"the data is {name}; supported are {', '.join(sorted(f.value for f in formats))}",
        )
    try:
        header = _READERS[kind](data)
    except BadHeader as error:
        raise Fault.of_item(
            Reason.MEDIA_DECODE_FAILED, index, f"the {kind.value} header is damaged"
        ) from error
    if header.raw_width <= 0 or header.raw_height <= 0:
        raise Fault.of_item(
            Reason.MEDIA_DECODE_FAILED, index, f"the {kind.value} header gives no valid size"
        )
    if max(header.raw_width, header.raw_height) > _MAX_SIDE:
        raise Fault.of_item(
            Reason.MEDIA_TOO_LARGE,
            index,
            f"the image has {header.width}x{header.height} pixels, the limit of a side is"
            f" {_MAX_SIDE}",
            size=max(header.raw_width, header.raw_height),
            limit=_MAX_SIDE,
        )
    if header.pixels > max_pixels:
        raise Fault.of_item(
            Reason.MEDIA_TOO_LARGE,
            index,
            f"the image has {header.width}x{header.height} = {header.pixels} pixels,"
            f" the limit is {max_pixels}",
            size=header.pixels,
            limit=max_pixels,
        )
    return header


def size_from_prefix(prefix: bytes) -> tuple[int, int] | None:
    """Upright (width, height) from the first bytes of a file; None where they do not tell.

    4 KiB do for most files, 64 KiB for nearly all. Where a file keeps its EXIF
    block at the end (WebP, some PNG) the two may come out exchanged: good for
    an estimate only.
    """
    kind = format_of(prefix)
    if kind is None:
        return None
    try:
        header = _READERS[kind](prefix)
    except BadHeader:
        return None
    sides = header.raw_width, header.raw_height
    if min(sides) <= 0 or max(sides) > _MAX_SIDE:
        return None
    return header.width, header.height


def format_of(data: bytes) -> ImageFormat | None:
    """The format by its first bytes."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ImageFormat.WEBP
    if isobmff.brands(data) & {b"avif", b"avis"}:
        return ImageFormat.AVIF
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), None)


def foreign_name(data: bytes) -> str:
    """What refused bytes are, for the message; our own words only."""
    if not data:
        return "empty"
    if data[4:8] == b"ftyp":
        return "HEIC" if isobmff.is_heif(data) else "MP4 or QuickTime video"
    for magic, name in _FOREIGN:
        if data.startswith(magic):
            return name
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in head:
        return "SVG"
    if head.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if all(byte >= 0x20 or byte in b"\t\r\n" for byte in head):
        return "text"
    return "of an unknown format"
