"""Image files of every kind that Pillow can write, and some that only old programs wrote."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from tests.media.images import DATA

ORIENTATIONS = range(10)


def exif(orientation: int, *, order: str = "<", kind: int = 3) -> bytes:
    """An EXIF block with one entry."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    value = struct.pack(order + ("L" if kind == 4 else "H"), orientation).ljust(4, b"\0")
    return (
        b"Exif\0\0"
        + head
        + struct.pack(order + "LHHHL", 8, 1, 0x112, kind, 1)
        + value
        + b"\0\0\0\0"
    )


def xmp(orientation: int) -> bytes:
    """An XMP packet with an orientation."""
    return b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>' % orientation


def written_by_pillow() -> Iterator[tuple[str, bytes]]:
    """Every mode in every format with every option that changes how it is decoded."""
    turned: list[dict[str, Any]] = [{"exif": exif(o)} for o in ORIENTATIONS]
    second = photo().rotate(20)
    options: dict[str, list[dict[str, Any]]] = {
        "JPEG": [
            {}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}, {"quality": 20},
            {"quality": 100}, {"restart_marker_blocks": 3}, {"keep_rgb": True},
            {"xmp": xmp(6)}, {"exif": exif(8), "xmp": xmp(6)}, {"exif": exif(6, order=">")},
            {"exif": exif(6, order=">", kind=4)}, {"exif": exif(6, kind=1)}, *turned,
        ],
        "PNG": [
            {}, {"bits": 2}, {"bits": 4}, {"transparency": 5}, {"transparency": (1, 2, 3)},
            {"transparency": bytes(range(50))}, *turned,
        ],
        "WEBP": [
            {}, {"lossless": True, "exact": True}, {"xmp": xmp(6)},
            {"save_all": True, "append_images": [second]}, *turned,
        ],
        "GIF": [
            {}, {"transparency": 3}, {"interlace": 0},
            {"save_all": True, "append_images": [second], "transparency": 0, "disposal": 2},
        ],
        "BMP": [{}],
        "TIFF": [
            {}, {"compression": "tiff_lzw"}, {"compression": "tiff_deflate"},
            {"compression": "jpeg"}, {"compression": "packbits"}, {"big_tiff": True},
            *({"tiffinfo": {274: o}} for o in ORIENTATIONS),
            *({"tiffinfo": {274: o}, "compression": "tiff_lzw"} for o in range(1, 9)),
        ],
        "AVIF": [{}, {"exif": exif(5)}, {"save_all": True, "append_images": [second]}],
        "MPO": [{"save_all": True, "append_images": [second]}],
    }  # fmt: skip
    for kind, choices in options.items():
        for (mode, image), choice in itertools.product(modes(), choices):
            file = io.BytesIO()
            try:
                image.save(file, kind, **choice)
            except (OSError, ValueError, TypeError, AttributeError, KeyError, RuntimeError):
                continue  # Pillow cannot write this mode in this format
            shown = {k: len(v) if isinstance(v, bytes | list) else v for k, v in choice.items()}
            yield f"{kind} {mode} {shown}", file.getvalue()


def png_by_hand() -> Iterator[tuple[str, bytes]]:
    """Every colour type and depth, with and without transparency, EXIF early and late."""
    rng = np.random.default_rng(1)
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
    depths = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
    keys: dict[int, list[bytes]] = {0: [b"\0\1"], 2: [b"\0\1\0\2\0\3"], 3: [b"\x80", b"\0\xff"]}
    for colour, depth in ((c, d) for c, ds in depths.items() for d in ds):
        stride = (13 * channels[colour] * depth + 7) // 8
        rows = b"".join(bytes([row % 5]) + rng.bytes(stride) for row in range(9))
        palette = [(b"PLTE", rng.bytes(3 * 2 ** min(depth, 8)))] if colour == 3 else []
        for transparency in (None, *keys.get(colour, [])):
            tail = [(b"tRNS", transparency)] if transparency else []
            for late in (False, True):
                block = [(b"eXIf", exif(6)[6:])]
                before = palette + tail + ([] if late else block)
                yield (
                    f"PNG colour {colour} depth {depth} tRNS {transparency!r} late {late}",
                    png(13, 9, depth, colour, rows, before, block if late else []),
                )
    plain = b"".join(b"\0" + rng.bytes(39) for _ in range(9))
    profile = b"Raw profile type exif\0\nexif\n%8d\n" % len(exif(6)) + exif(6).hex().encode()
    packed = b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(6))
    yield "PNG raw profile", png(13, 9, 8, 2, plain, [(b"tEXt", profile)], [])
    yield "PNG packed XMP", png(13, 9, 8, 2, plain, [(b"iTXt", packed)], [])


def gif_by_hand() -> Iterator[tuple[str, bytes]]:
    """First pictures that do not fill, or stick out of, their screen."""
    file = io.BytesIO()
    photo().quantize(20).save(file, "GIF")
    data = file.getvalue()
    at = data.index(b",\0\0\0\0")
    for screen, place in itertools.product(((100, 80), (30, 20), (67, 45)), ((0, 0), (10, 5))):
        changed = bytearray(data)
        changed[6:10] = struct.pack("<HH", *screen)
        changed[at + 1 : at + 5] = struct.pack("<HH", *place)
        yield f"GIF screen {screen} place {place}", bytes(changed)


def bmp_by_hand() -> Iterator[tuple[str, bytes]]:
    """Depths, masks and directions that Pillow does not write."""
    rng = np.random.default_rng(2)
    pixels = rng.bytes(8 * 4 * 6)
    rgb, rgba = (0xFF0000, 0xFF00, 0xFF), (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    yield "BMP masks with alpha", bmp(32, 3, 108, 6, pixels, struct.pack("<LLLL", *rgba))
    yield "BMP masks", bmp(32, 3, 40, 6, pixels, struct.pack("<LLL", *rgb))
    yield "BMP top down", bmp(32, 0, 40, -6, pixels)
    yield "BMP 24", bmp(24, 0, 40, 6, pixels[:144])
    yield "BMP 16", bmp(16, 0, 40, 6, pixels[:96])
    for bits in (1, 4, 8):
        palette = rng.bytes(4 * 2**bits)
        yield f"BMP {bits}", bmp(bits, 0, 40, 6, pixels[: max(8 * bits // 8, 4) * 6], b"", palette)


def photo() -> Image.Image:
    """A small photograph, RGB, 67 x 45."""
    name = DATA / "images" / "photo_333x517_422.jpg"
    return Image.open(name).convert("RGB").resize((67, 45))


def modes() -> Iterator[tuple[str, Image.Image]]:
    """The photograph, or noise, in every mode that files have."""
    rng = np.random.default_rng(3)
    rgba = photo()
    rgba.putalpha(Image.fromarray(rng.integers(0, 256, (45, 67), dtype=np.uint8)))
    for mode in ("RGB", "L", "1", "CMYK", "YCbCr"):
        yield mode, photo().convert(mode)
    yield "RGBA", rgba
    yield "LA", rgba.convert("LA")
    yield "P", photo().quantize(60)
    yield "I;16", Image.fromarray(rng.integers(0, 65536, (45, 67), dtype=np.uint16))
    yield "I", Image.fromarray(rng.integers(-100, 65536, (45, 67), dtype=np.int32))
    yield "F", Image.fromarray(rng.random((45, 67), dtype=np.float32) * 300)


def png(
    width: int,
    height: int,
    depth: int,
    colour: int,
    rows: bytes,
    before: list[tuple[bytes, bytes]],
    after: list[tuple[bytes, bytes]],
) -> bytes:
    """A PNG file of the given chunks around one IDAT."""
    head = struct.pack(">LLBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", head), *before, (b"IDAT", zlib.compress(rows)), *after, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">L", len(body)) + kind + body + struct.pack(">L", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def bmp(
    bits: int,
    compression: int,
    header: int,
    height: int,
    body: bytes,
    masks: bytes = b"",
    palette: bytes = b"",
) -> bytes:
    """A BMP file, 8 pixels wide."""
    info = struct.pack(
        "<LllHHLLllLL",
        header,
        8,
        height,
        1,
        bits,
        compression,
        len(body),
        0,
        0,
        len(palette) // 4,
        0,
    )
    info = (info + masks).ljust(header, b"\0")
    offset = 14 + len(info) + len(palette)
    return b"BM" + struct.pack("<LHHL", offset + len(body), 0, 0, offset) + info + palette + body
