"""Back from patches to pictures, and what the model saw in them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from router.vision.values import from_bfloat16, round_to_bfloat16
from workers.sim.bundle import Family

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Sight:
    """What the encoder keeps of one item: enough to speak of it.

    `grid` is (temporal patches, patch rows, patch columns); `colour` the mean
    of all pixels; `digest` the first 8 hex digits of BLAKE3 over the resized
    RGB bytes, row by row and frame by frame.
    """

    modality: str
    frames: int
    width: int
    height: int
    grid: Grid
    colour: tuple[int, int, int]
    digest: str

    def describe(self, number: int) -> str:
        """One sentence about it; `number` counts the items of its modality from 1."""
        grid = "x".join(map(str, self.grid))
        colour = "#{:02x}{:02x}{:02x}".format(*self.colour)
        what = f"{self.width}x{self.height} pixels"
        if self.modality == "video":
            what = f"{self.frames} frames of {what}"
        return (
            f"{self.modality.capitalize()} {number} is {what} (grid {grid}), "
            f"mean colour {colour}, hash {self.digest}."
        )


@dataclass(frozen=True)
class Intake:
    """How the worker takes pixel values: as levels that it normalises itself, or normalised.

    Normalised values reach the encoder in `dtype`, however they came.
    """

    device_normalize: bool
    dtype: str


def levels(values: npt.NDArray[Any], family: Family, intake: Intake) -> npt.NDArray[np.uint8]:
    """The 0..255 levels behind pixel values [n, 3 * temporal * patch * patch].

    Whoever sends the other kind of values is not told: the levels are merely
    wrong, as the real encoder's input would be. In bfloat16 a normalised value
    may stand for two neighbouring levels of some families; the picture is then
    what the encoder can still tell apart.
    """
    if intake.device_normalize:
        if values.dtype == np.uint8:
            return values
        return _round(values.astype(np.float32))
    per_channel = _cast(values.astype(np.float32), intake.dtype).reshape(len(values), 3, -1)
    mean = np.array(family.mean, np.float32)[:, None]
    std = np.array(family.std, np.float32)[:, None]
    return _round((per_channel * std + mean) * 255).reshape(values.shape)


def _cast(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return from_bfloat16(round_to_bfloat16(values))
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    return values


def _round(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    finite = np.nan_to_num(values, nan=0.0, posinf=255.0, neginf=0.0)
    return np.clip(np.rint(finite), 0, 255).astype(np.uint8)


def rebuild(patches: npt.NDArray[np.uint8], grid: Grid, family: Family) -> npt.NDArray[np.uint8]:
    """Frames uint8 [t * temporal, height, width, 3] from patches [t*h*w, values].

    The layout is [t][h/m][w/m][m][m][channel][temporal][patch][patch], with m
    the merge size.
    """
    t, h, w = grid
    m, p, depth = family.merge_size, family.patch_size, family.temporal_patch_size
    blocks = patches.reshape(t, h // m, w // m, m, m, 3, depth, p, p)
    frames = blocks.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5)
    return np.ascontiguousarray(frames).reshape(t * depth, h * p, w * p, 3)


def look(patches: npt.NDArray[np.uint8], grid: Grid, family: Family, modality: str) -> Sight:
    """What is to be seen in one item's patches.

    A still picture comes once per temporal slot; where the copies differ, all
    of them are looked at.
    """
    frames = rebuild(patches, grid, family)
    if modality == "image" and all(np.array_equal(frames[0], copy) for copy in frames[1:]):
        frames = frames[:1]
    count, height, width, _ = frames.shape
    mean = frames.reshape(-1, 3).mean(axis=0, dtype=np.float64)
    red, green, blue = (int(value) for value in np.rint(mean))
    return Sight(
        modality=modality,
        frames=count,
        width=width,
        height=height,
        grid=grid,
        colour=(red, green, blue),
        digest=blake3(frames.reshape(-1).data).hexdigest()[:8],
    )


class EncoderCache:
    """Sights by item identity, least recently used out first.

    The identity is taken on trust: other pixels under a known one are not
    even looked at.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sights: OrderedDict[str, Sight] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def find(self, identifier: str) -> Sight | None:
        sight = self._sights.get(identifier)
        if sight is None:
            self.misses += 1
            return None
        self.hits += 1
        self._sights.move_to_end(identifier)
        return sight

    def latest(self) -> Sight | None:
        """The one that was used last."""
        return next(reversed(self._sights.values()), None)

    def keep(self, identifier: str, sight: Sight) -> None:
        self._sights[identifier] = sight
        self._sights.move_to_end(identifier)
        while len(self._sights) > self._capacity:
            self._sights.popitem(last=False)

    def clear(self) -> None:
        self._sights.clear()
