"""What the 256 levels of a channel become.

After an exact uint8 resize, rescaling and normalising is a function of one
byte and its channel. Running the model's own formula once over the 256 levels
gives a table that equals the reference for every picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Formula = Literal["fused", "to_tensor", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Normalization:
    """`mean` and `std` per channel, and the arithmetic that applies them.

    `fused`: torchvision's processors, (x - mean/rescale) / (std/rescale) in
    float32. `to_tensor`: x/255, then (x - mean)/std in float32. `bfloat16`:
    each step rounded to bfloat16, as Llama 4 does.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float = 1 / 255
    formula: Formula = "fused"


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """`levels` [3, 256] in the output's dtype; `identity` when it is the level itself in uint8."""

    levels: npt.NDArray[Any]
    identity: bool


@lru_cache(maxsize=64)
def value_table(normalization: Normalization, dtype: str, normalized: bool) -> Table:
    """The table of one output format; bfloat16 as uint16 bit patterns."""
    level = np.broadcast_to(np.arange(256, dtype=np.float32), (3, 256))
    if dtype == "uint8":
        return Table(np.ascontiguousarray(level.astype(np.uint8)), identity=True)
    values = _normalise(normalization, level) if normalized else level
    return Table(np.ascontiguousarray(_cast(values, dtype)), identity=False)


def fill_value(flat: npt.NDArray[Any], shape: tuple[int, ...], table: Table, level: int) -> None:
    """Fill an output of channels-first pictures [..., 3, h, w] with one level."""
    pictures = flat.reshape(-1, 3, shape[-2] * shape[-1])
    for channel in range(3):
        pictures[:, channel] = table.levels[channel, level]


def read_normalization(
    settings: Mapping[str, Any], where: str, formula: Formula = "fused"
) -> Normalization:
    """Mean, std and rescale factor of a preprocessor config.

    Raises ValueError when one is missing or is not a positive, finite number
    per channel.
    """
    for switch in ("do_rescale", "do_normalize"):
        if settings.get(switch, True) is False:
            raise ValueError(f"{where}: {switch} false is not supported")
    rescale = settings.get("rescale_factor", 1 / 255)
    if not isinstance(rescale, int | float) or not 0 < rescale < 1e9:
        raise ValueError(f"{where}: rescale_factor is not a positive number")
    std = _triple(settings.get("image_std"), f"{where}: image_std")
    if min(std) <= 0:
        raise ValueError(f"{where}: image_std is not positive")
    return Normalization(
        _triple(settings.get("image_mean"), f"{where}: image_mean"), std, float(rescale), formula
    )


def round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bit patterns of float32 values rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """float32 values of bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _normalise(
    normalization: Normalization, level: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    mean = np.array(normalization.mean, dtype=np.float32)[:, None]
    std = np.array(normalization.std, dtype=np.float32)[:, None]
    if normalization.formula == "fused":
        inverse = np.float32(1.0 / normalization.rescale)
        return np.asarray((level - mean * inverse) / (std * inverse), np.float32)
    if normalization.formula == "to_tensor":
        return np.asarray((level / np.float32(255) - mean) / std, np.float32)
    scaled = _in_bfloat16(level * np.float32(normalization.rescale))
    centred = _in_bfloat16(scaled - _in_bfloat16(mean))
    return _in_bfloat16(centred / _in_bfloat16(std))


def _in_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return from_bfloat16(round_to_bfloat16(values))


def _cast(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        return round_to_bfloat16(values)
    return values.astype(np.dtype(dtype))


def _triple(value: object, where: str) -> tuple[float, float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 3:
        raise ValueError(f"{where} does not hold three numbers")
    numbers = [float(v) for v in value if isinstance(v, int | float)]
    if len(numbers) != 3 or not all(np.isfinite(numbers)):
        raise ValueError(f"{where} does not hold three numbers")
    return (numbers[0], numbers[1], numbers[2])
