"""JPEG: segments up to the first scan (ITU T.81, annex B)."""

from __future__ import annotations

import numpy as np

from router.media.formats import exif
from router.media.header import BadHeader, Colour, ImageFormat, ImageHeader, Truncated

# Camera files have a few dozen segments, large ICC profiles a few hundred.
_MAX_SEGMENTS = 4096
_MAX_FILL = 4096
# EXIF goes on in as many segments; the reference copies what it has for each.
_MAX_EXIF_PARTS = 64
_SLICE = 4 * 1024 * 1024
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})
# In a scan: stuffed zeros, fill bytes, restarts.
_IN_SCAN = np.zeros(256, bool)
_IN_SCAN[[0x00, 0xFF, *range(0xD0, 0xD8)]] = True
# Where another scan may follow, its segments too: tables, start of scan, restart
# interval, APPn, comment.
_BETWEEN_SCANS = _IN_SCAN.copy()
_BETWEEN_SCANS[[0xC4, 0xDA, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)]] = True
_COLOURS = {1: Colour.GREY, 3: Colour.RGB, 4: Colour.CMYK}


def read(data: bytes) -> ImageHeader:
    """Reads the header of a JPEG file. Raises BadHeader."""
    frame: tuple[int, int, int, int] | None = None
    many_scans, bounded, scan_at = False, True, 0
    exif_parts: list[bytes] = []
    xmp: bytes | None = None
    at = 2
    for _ in range(_MAX_SEGMENTS):
        marker, at = _next_marker(data, at)
        if marker in _ALONE:
            continue
        if marker == 0xDA and frame is not None and at + 2 < len(data):
            # A first scan without all the components means that more follow.
            many_scans |= data[at + 2] != frame[3]
            scan_at = at + int.from_bytes(data[at : at + 2], "big")
        if marker is None or marker in (0xDA, 0xD9):
            break
        length = int.from_bytes(data[at : at + 2], "big")
        if at + 2 > len(data) or length < 2:
            break
        body, end = at + 2, at + length
        if marker in _FRAMES and frame is None:
            if body + 6 > len(data):
                break
            height = int.from_bytes(data[body + 1 : body + 3], "big")
            width = int.from_bytes(data[body + 3 : body + 5], "big")
            frame = (data[body], width, height, data[body + 5])
            many_scans = marker in _PROGRESSIVE
        elif marker == 0xE1 and data.startswith(b"Exif\0\0", body):
            # A long EXIF block goes on in further segments.
            exif_parts.append(data[body + 6 if exif_parts else body : end])
        elif marker == 0xE1 and data.startswith(b"http://ns.adobe.com/xap/1.0/\0", body):
            xmp = data[body + 29 : end]
        at = end
    else:
        bounded = False
    if frame is None:
        raise Truncated("no frame header")
    precision, width, height, components = frame
    if components not in _COLOURS:
        raise BadHeader("number of components")
    return ImageHeader(
        ImageFormat.JPEG,
        width,
        height,
        orientation=exif.orientation(b"".join(exif_parts), xmp),
        bit_depth=precision,
        colour=_COLOURS[components],
        many_scans=many_scans,
        scan_at=scan_at,
        bounded=bounded and len(exif_parts) <= _MAX_EXIF_PARTS,
    )


def is_regular(data: bytes, header: ImageHeader) -> bool:
    """Whether from the first scan on there are only the markers that belong there.

    Entropy-coded data that was damaged into a marker ends the scan early, and
    decoders differ in what they make of the rest. What looks irregular may still
    be sound (a comment behind the only scan), and is for the reference to decide.
    """
    if not header.scan_at:
        return False
    belongs = _BETWEEN_SCANS if header.many_scans else _IN_SCAN
    codes = np.frombuffer(data, np.uint8)
    for begin in range(header.scan_at, len(data), _SLICE):
        window = codes[begin : begin + _SLICE + 1]
        markers = window[np.flatnonzero(window[:-1] == 0xFF) + 1]
        ends = np.flatnonzero(markers == 0xD9)
        # Cameras append more behind the end of the image.
        if not belongs[markers[: ends[0]] if len(ends) else markers].all():
            return False
        if len(ends):
            return True
    return False


def _next_marker(data: bytes, at: int) -> tuple[int | None, int]:
    """The next marker and the offset after it; None at the end of the data."""
    at = data.find(b"\xff", at, at + _MAX_FILL)
    if at < 0:
        return None, len(data)
    # Any number of fill bytes may stand before the code; a file may consist of them.
    following = data[at + 1 : at + _MAX_FILL]
    code = following.lstrip(b"\xff")[:1]
    if not code:
        return None, len(data)
    position = at + 1 + following.index(code)
    return (None, position) if code == b"\0" else (code[0], position + 1)
