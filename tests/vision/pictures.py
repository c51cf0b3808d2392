"""Decoded test pictures, by the rule that the golden data was made with."""

from __future__ import annotations

import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

DATA = Path(__file__).parent.parent / "data"


def golden(name: str) -> Any:
    return json.loads((DATA / "goldens" / name).read_text())


@lru_cache(maxsize=4)
def picture(name: str) -> npt.NDArray[np.uint8]:
    """Upright RGB pixels, uint8 [h, w, 3]; transparency lies on white."""
    raw = (DATA / "images" / name).read_bytes()
    opened = Image.open(io.BytesIO(raw))
    if opened.mode == "RGB":
        pixels = cv2.imdecode(np.frombuffer(raw, np.uint8), cv2.IMREAD_COLOR_RGB)
        return np.ascontiguousarray(pixels)
    upright = ImageOps.exif_transpose(opened)
    if upright.mode == "RGBA":
        canvas = Image.new("RGB", upright.size, (255, 255, 255))
        canvas.paste(upright, mask=upright.split()[3])
        return np.asarray(canvas)
    return np.asarray(upright.convert("RGB"))
