"""Run under numba's CUDA simulator: every kind of draw, against the CPU's bits.

A process of its own, as the simulator has to be chosen before numba is imported.
"""

from __future__ import annotations

import sys

import numpy as np

from router.vision.backend import cuda as device
from router.vision.backend.cpu import CpuBackend
from router.vision.geometry import Box, Draw, Patches, Tiles, whole
from router.vision.values import Normalization, Table, value_table

CPU = CpuBackend()
FAILURES: list[int] = []
GPU = device.CudaBackend(CPU, smallest=0, on_failure=lambda: FAILURES.append(1))
SQUARE = Tiles(1, 1, 8, 8)
DRAWS = {
    "two passes": Draw(whole(14, 11), 8, 8, whole(8, 8), "bicubic", "torch", SQUARE),
    "across alone": Draw(whole(14, 8), 8, 8, whole(8, 8), "bilinear", "torch", SQUARE),
    "down alone": Draw(whole(8, 11), 8, 8, whole(8, 8), "bicubic", "torch", SQUARE),
    "no pass": Draw(whole(8, 8), 8, 8, whole(8, 8), "bicubic", "torch", SQUARE),
    "vertical first": Draw(whole(9, 20), 8, 8, whole(8, 8), "bicubic", "pillow13", SQUARE),
    "a window": Draw(whole(14, 11), 10, 13, Box(2, 1, 8, 8), "bicubic", "torch", SQUARE),
    "a window without passes": Draw(
        whole(12, 10), 10, 12, Box(2, 1, 8, 8), "bicubic", "torch", SQUARE
    ),
    "a crop": Draw(Box(3, 2, 9, 7), 8, 8, whole(8, 8), "bilinear", "torch", SQUARE),
    "tiles, padded": Draw(
        whole(14, 11), 6, 7, whole(7, 6), "bicubic", "torch", Tiles(2, 2, 4, 4), 1, 1, 48
    ),
    "patches": Draw(
        whole(14, 11), 8, 8, whole(8, 8), "bicubic", "torch", Patches(4, 4, 2, 2, 2, 2)
    ),
    "one frame of two": Draw(
        whole(14, 11), 8, 8, whole(8, 8), "bicubic", "torch", Patches(4, 4, 2, 2, 2, 1), start=4
    ),
}


def tables() -> dict[str, Table]:
    clip = Normalization((0.48, 0.45, 0.40), (0.26, 0.27, 0.28))
    return {
        name: value_table(clip, name, normalized=name != "uint8")
        for name in ("uint8", "bfloat16", "float32")
    }


def main() -> None:
    noise = np.random.default_rng(5)
    pixels = noise.integers(0, 256, (24, 24, 3), dtype=np.uint8)
    for name, draw in DRAWS.items():
        source = pixels[: draw.crop.top + draw.crop.height, : draw.crop.left + draw.crop.width]
        for dtype, table in tables().items():
            size = draw.start + 3 * draw.layout.height * draw.layout.width * 2
            expected = np.full(size, 7, table.levels.dtype)
            found = expected.copy()
            CPU.draw(source, draw, table, expected)
            GPU.draw(source, draw, table, found)
            if not np.array_equal(expected, found) or FAILURES:
                sys.exit(f"{name} in {dtype} differs or failed")
    now = [0.0]
    broken = device.CudaBackend(
        CPU, smallest=0, on_failure=lambda: FAILURES.append(1), clock=lambda: now[0]
    )
    draw, table = DRAWS["patches"], tables()["uint8"]
    expected, found = np.zeros(384, np.uint8), np.zeros(384, np.uint8)
    CPU.draw(pixels, draw, table, expected)

    def fails(*_: object) -> None:
        raise RuntimeError("the device fell off the bus")

    def tried(seconds: float) -> int:
        """How often the device has failed after three draws, so much later."""
        now[0] += seconds
        for _ in range(3):
            found[:] = 0
            broken.draw(pixels, draw, table, found)
            if not np.array_equal(expected, found):
                sys.exit("a failed draw was lost")
        return len(FAILURES)

    works, device._place = device._place, fails  # type: ignore[assignment]
    # It rests for 10 s, then for 20.
    seen = [tried(0), tried(9), tried(2), tried(19), tried(2)]
    if seen != [1, 1, 2, 2, 3]:
        sys.exit(f"a dead device was tried at the wrong times: {seen}")
    device._place = works
    if tried(41) != 3 or not broken._free:
        sys.exit("a device that is well again is not used")
    device._place = fails  # type: ignore[assignment]
    # And is trusted as before.
    seen = [tried(0), tried(9), tried(2)]
    if seen != [4, 4, 5]:
        sys.exit(f"the rest after a recovery is wrong: {seen}")
    print("equal")


if __name__ == "__main__":
    main()
