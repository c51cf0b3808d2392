"""What the header of an image file says, before any decoder runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ImageFormat(Enum):
    """The formats that can be decoded."""

    JPEG = "JPEG"
    PNG = "PNG"
    WEBP = "WebP"
    GIF = "GIF"
    BMP = "BMP"
    TIFF = "TIFF"
    AVIF = "AVIF"
    JPEG2000 = "JPEG 2000"


class Colour(Enum):
    """How the file stores a pixel."""

    GREY = "grey"
    RGB = "RGB"
    CMYK = "CMYK"
    PALETTE = "palette"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """One image file's header.

    `raw_width` and `raw_height` are as stored; `width` and `height` are those of
    the upright picture, after the EXIF `orientation` (1 to 8). `has_alpha` means
    that some pixel may be transparent. `bit_depth` is per channel.
    """

    format: ImageFormat
    raw_width: int
    raw_height: int
    orientation: int = 1
    has_alpha: bool = False
    bit_depth: int = 8
    colour: Colour = Colour.RGB
    animated: bool = False
    # JPEG only: the picture may be coded in any number of passes.
    many_scans: bool = False
    # JPEG only: where the first scan's coded data begin; 0 if they were not reached.
    scan_at: int = 0
    # Nothing in the file's structure on which two decoders could disagree.
    plain: bool = True
    # The reader has seen every part of the file that a decoder would walk through.
    bounded: bool = True

    @property
    def width(self) -> int:
        """Pixels across, upright."""
        return self.raw_height if self.orientation >= 5 else self.raw_width

    @property
    def height(self) -> int:
        """Pixels down, upright."""
        return self.raw_width if self.orientation >= 5 else self.raw_height

    @property
    def pixels(self) -> int:
        """Width times height."""
        return self.raw_width * self.raw_height


class BadHeader(ValueError):
    """The bytes begin like an image of a known format but are not one."""


class Truncated(BadHeader):
    """The bytes end before the size of the image is known."""
