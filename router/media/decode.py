"""Encoded bytes to upright RGB, bit for bit what the workers' own loader gives.

The rule is vLLM's: the first frame, EXIF orientation applied, transparency
blended on white, everything else converted to RGB the way Pillow does. The three
formats that are nearly all of the traffic have decoders that are faster, and
equal while the file is sound: libjpeg-turbo for JPEG, OpenCV for PNG and WebP.
Pillow, which defines the rule, decodes the rest and whatever these will not read.

No JPEG is for OpenCV. It fills with grey what damage has taken, and is content;
and it writes each picture twice, into memory that was never used before, which
takes as long again as the decoding. libjpeg-turbo takes the memory to write to,
and says when it has a doubt.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageOps

from router.faults import Fault, Reason
from router.media.formats import jpeg
from router.media.header import Colour, ImageFormat, ImageHeader
from router.media.sandbox.process import DecoderProcess, SandboxFailed
from router.media.sandbox.protocol import Job, Kind

Pixels: TypeAlias = NDArray[np.uint8]
# Makes an uninitialised array of a shape and dtype.
Empty: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]

# Red, green and blue behind what is transparent.
Background: TypeAlias = tuple[int, int, int]
WHITE: Background = (255, 255, 255)

_U8 = np.dtype(np.uint8)

# The room runs its own bounded pool; a second pool inside each call would only
# fight with it. OpenCV's own messages quote the data and go to stderr.
cv2.setNumThreads(1)
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
# Sizes are judged from the header before decode, with the request's own limit.
Image.MAX_IMAGE_PIXELS = None
# Pillow warns and logs about odd files with words from the files themselves.
logging.getLogger("PIL").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", module=r"PIL\.")

_PILLOW_NAMES = {
    ImageFormat.JPEG: ("JPEG", "MPO"),
    ImageFormat.PNG: ("PNG",),
    ImageFormat.WEBP: ("WEBP",),
    ImageFormat.GIF: ("GIF",),
    ImageFormat.BMP: ("BMP",),
    ImageFormat.TIFF: ("TIFF",),
    ImageFormat.AVIF: ("AVIF",),
    ImageFormat.JPEG2000: ("JPEG2000",),
}
_ISOLATED = frozenset({ImageFormat.TIFF, ImageFormat.AVIF, ImageFormat.JPEG2000})
# Encoders make about ten.
_MAX_SCANS = 64
_SLICE = 1024 * 1024
_RGB = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION


def is_hard(data: bytes, header: ImageHeader) -> bool:
    """Whether the image belongs into the sandbox. May take milliseconds for a long file.

    Because of the decoder (TIFF, AVIF, JPEG 2000: large libraries, seldom used),
    or because no header bounds the work: a progressive JPEG may go over every
    pixel any number of times, a file may consist of millions of empty parts.
    """
    if header.format in _ISOLATED or not header.bounded:
        return True
    if not header.many_scans:
        return False
    # In slices, so that the interpreter lock can change hands.
    scans = 0
    for start in range(0, len(data), _SLICE):
        scans += data.count(b"\xff\xda", start, start + _SLICE)
        if scans > _MAX_SCANS:
            return True
    return False


def decode_in_process(
    data: bytes,
    header: ImageHeader,
    index: int,
    *,
    background: Background = WHITE,
    empty: Empty = np.empty,
) -> Pixels:
    """Decodes one image that `sniff` has let through, here, into an `empty` array.

    Returns uint8 [height, width, 3], RGB, upright, C-contiguous, blended on
    `background` where it is transparent. Blocks; runs without the interpreter
    lock for nearly all of its time. Raises Fault
    MEDIA_DECODE_FAILED for damaged bytes, and for a picture whose size is not
    the header's.
    """
    pixels = None
    if _libjpeg_is_equal(data, header):
        pixels = _with_libjpeg(data, header, empty)
    elif _opencv_is_equal(header):
        pixels = _with_opencv(data, header, background, empty)
    if pixels is None:
        pixels = _with_pillow(data, header, background)
    if pixels is None or pixels.shape != (header.height, header.width, 3):
        raise damaged(header, index)
    return pixels


def decode_in_sandbox(
    process: DecoderProcess,
    data: bytes,
    header: ImageHeader,
    index: int,
    *,
    background: Background = WHITE,
    timeout: float,
) -> Pixels:
    """The same in a decoder process, within `timeout` seconds."""
    try:
        _, pixels = process.call(
            Job(Kind.IMAGE, len(data), background=int.from_bytes(background)),
            data,
            timeout=timeout,
            shape=(header.height, header.width, 3),
        )
    except SandboxFailed:
        raise damaged(header, index) from None
    return pixels


def damaged(header: ImageHeader, index: int) -> Fault:
    """The one fault of every image that does not decode."""
    return Fault.of_item(
        Reason.MEDIA_DECODE_FAILED, index, f"the {header.format.value} data is damaged or truncated"
    )


def _libjpeg_is_equal(data: bytes, header: ImageHeader) -> bool:
    if header.format is not ImageFormat.JPEG or not header.plain:
        return False
    eight_bit = header.bit_depth == 8 and header.colour is not Colour.CMYK
    return eight_bit and jpeg.is_regular(data, header)


def _opencv_is_equal(header: ImageHeader) -> bool:
    if not header.plain:
        return False
    match header.format:
        case ImageFormat.PNG:
            # 16-bit grey is clipped by the reference, not scaled; transparency
            # of grey and palette files is Pillow's to expand.
            if header.colour is Colour.GREY:
                return header.bit_depth <= 8 and not header.has_alpha
            return header.colour is Colour.RGB or not header.has_alpha
        case ImageFormat.WEBP:
            return True
        case _:
            return False


def _with_libjpeg(data: bytes, header: ImageHeader, empty: Empty) -> Pixels | None:
    """None for a JPEG that it has the least doubt about: that is for the reference to judge."""
    pixels: Pixels = empty((header.raw_height, header.raw_width, 3), _U8)
    try:
        decoded = simplejpeg.decode_jpeg(data, "RGB", buffer=pixels, strict=True)
    except (ValueError, MemoryError):
        return None
    if decoded.shape != pixels.shape:
        return None
    return _upright(pixels, header.orientation, empty)


def _with_opencv(
    data: bytes, header: ImageHeader, background: Background, empty: Empty
) -> Pixels | None:
    flags = cv2.IMREAD_UNCHANGED if header.has_alpha else _RGB
    try:
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except (cv2.error, MemoryError):
        return None
    if decoded is None or decoded.ndim != 3:
        return None
    if decoded.dtype == np.uint16:
        decoded = np.right_shift(decoded, 8, dtype=np.uint16, casting="unsafe")
    pixels = decoded.astype(np.uint8, copy=False)
    if pixels.shape[2] == 4:
        rgba = Image.fromarray(cv2.cvtColor(pixels, cv2.COLOR_BGRA2RGBA), "RGBA")
        pixels = np.array(_on(background, rgba))
    elif header.has_alpha:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB).astype(np.uint8, copy=False)
    return np.ascontiguousarray(_upright(pixels, header.orientation, empty))


def _upright(pixels: Pixels, orientation: int, empty: Empty) -> Pixels:
    """Undoes an EXIF orientation of 1 to 8 (OpenCV does it five times faster than numpy)."""
    height, width = pixels.shape[:2]
    if not 2 <= orientation <= 8:
        return pixels
    turned: Pixels = empty((height, width, 3) if orientation < 5 else (width, height, 3), _U8)
    match orientation:
        case 2 | 3 | 4:
            cv2.flip(pixels, {2: 1, 3: -1, 4: 0}[orientation], turned)
        case 5:
            cv2.transpose(pixels, turned)
        case 6:
            cv2.rotate(pixels, cv2.ROTATE_90_CLOCKWISE, turned)
        case 7:
            cv2.flip(cv2.transpose(pixels), -1, turned)
        case 8:
            cv2.rotate(pixels, cv2.ROTATE_90_COUNTERCLOCKWISE, turned)
    return turned


def _with_pillow(data: bytes, header: ImageHeader, background: Background) -> Pixels | None:
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_PILLOW_NAMES[header.format])
        if image.width * image.height != header.pixels:
            return None
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return np.array(_to_rgb(image, background))
    except MemoryError:
        return None
    except Exception:  # Pillow's plugins raise whatever their parsing trips over
        return None


def _to_rgb(image: Image.Image, background: Background) -> Image.Image:
    if image.mode == "RGBA":
        return _on(background, image)
    if image.mode != "RGB" and image.has_transparency_data:
        return _on(background, image.convert("RGBA"))
    return image.convert("RGB")


def _on(background: Background, rgba: Image.Image) -> Image.Image:
    blended = Image.new("RGB", rgba.size, background)
    blended.paste(rgba, mask=rgba.getchannel("A"))
    return blended
