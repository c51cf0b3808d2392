"""The example files and what the reference software makes of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent.parent / "data"
GOLDENS: dict[str, dict[str, Any]] = json.loads((DATA / "goldens" / "decode.json").read_text())
GOOD = sorted(name for name, golden in GOLDENS.items() if "error" not in golden)
BAD = sorted(name for name, golden in GOLDENS.items() if "error" in golden)


def read(name: str) -> bytes:
    """The bytes of one example file."""
    return (DATA / "images" / name).read_bytes()


def sha256(pixels: NDArray[np.uint8]) -> str:
    """The digest of the pixels as the goldens give it: row by row, three bytes a pixel."""
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()
