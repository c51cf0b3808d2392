"""What a backend does: draw resized pictures into an output, exactly."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from router.vision.geometry import Draw
from router.vision.values import Table


class Backend(Protocol):
    """Executes draws. All backends give the same bits; calls are thread-safe and block."""

    @property
    def name(self) -> str: ...

    def warm_up(self) -> None:
        """Compile and load everything, so that no request waits for it."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An uninitialised output array, from a pool where there is one."""

    def draw(
        self,
        pixels: npt.NDArray[np.uint8],
        draw: Draw,
        table: Table,
        out: npt.NDArray[Any],
    ) -> None:
        """Resize `draw.crop` of `pixels` [h, w, 3] and write it into the flat `out`."""
