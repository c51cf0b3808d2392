"""The workers' rule for one image, written out with Pillow: what decoding must equal."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps


def reference_pixels(data: bytes) -> NDArray[np.uint8]:
    """uint8 [height, width, 3] as the workers' loader makes them. Raises what Pillow raises."""
    image = Image.open(io.BytesIO(data))
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGBA" or (image.mode != "RGB" and image.has_transparency_data):
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        white.paste(rgba, mask=rgba.split()[3])
        image = white
    return np.asarray(image.convert("RGB"))
