"""Preprocessed media as a worker reads them: unpacked, checked, and sometimes fatal."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from router.wire import common, engine
from workers.sim.bundle import Family
from workers.sim.kvcache import Placed
from workers.sim.picture import Grid
from workers.sim.refused import invalid

_DTYPES = {
    "uint8": "u1",
    "int8": "i1",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    # No numpy type: read as bit patterns.
    "bfloat16": "<u2",
}
_PIXEL_DTYPES = ("uint8", "float16", "float32", "bfloat16")
_SHM = Path("/dev/shm")


class EngineKilled(Exception):
    """A real engine does not survive this request."""


@dataclass(frozen=True)
class TensorItem:
    """One item of a batch: its rows of pixel values and the prompt tokens it replaces.

    `fitting` is how many of its `features` find a placeholder token.
    """

    modality: str
    placed: Placed
    grid: Grid
    values: npt.NDArray[Any]
    features: int
    fitting: int


def read_batch(
    batch: engine.MultimodalInputs,
    ids: npt.NDArray[np.uint32],
    family: Family,
    pad_ids: dict[str, int],
    *,
    shared_memory: bool,
) -> list[TensorItem]:
    """The items of one modality's batch, for the prompt `ids` (uint32 [n]).

    Refused with INVALID_ARGUMENT for what a servicer rejects before the engine
    sees it. Raises EngineKilled for what only the engine stumbles over.
    """
    modality = _modality(batch.modality)
    ranges = [(place.offset, place.length) for place in batch.mm_placeholders]
    if not ranges:
        raise invalid("mm_inputs hold no placeholder")
    if len(batch.mm_hashes) < len(ranges):
        raise invalid(
            f"mm_inputs hold {len(batch.mm_hashes)} mm_hashes for {len(ranges)} placeholders"
        )
    if not batch.HasField("pixel_values"):
        raise invalid("mm_inputs hold no pixel_values")
    if batch.pixel_values.dtype not in _PIXEL_DTYPES:
        raise invalid(f"pixel_values of dtype {batch.pixel_values.dtype!r} are not understood")
    side = {
        name: unpack(tensor, name, shared_memory=shared_memory)
        for name, tensor in batch.model_specific_tensors.items()
    }
    values = unpack(batch.pixel_values, "pixel_values", shared_memory=shared_memory)
    grids = _grids(side, modality, len(ranges))
    _check_pixels(values, grids, family)
    _check_sizes(batch, side, grids)
    items: list[TensorItem] = []
    first = 0
    for at, ((offset, length), grid) in enumerate(zip(ranges, grids, strict=True)):
        features = prod(grid) // family.merge_size**2
        fitting = _fitting(ids, offset, length, modality, pad_ids)
        if fitting > features:
            raise EngineKilled(f"item {at}: {fitting} placeholders for {features} features")
        items.append(
            TensorItem(
                modality=modality,
                placed=Placed(batch.mm_hashes[at], offset, length),
                grid=grid,
                values=values[first : first + prod(grid)],
                features=features,
                fitting=fitting,
            )
        )
        first += prod(grid)
    return items


@dataclass(frozen=True)
class Identity:
    """An item without pixels; `grid` is None where the batch has no grid tensor."""

    modality: str
    placed: Placed
    grid: Grid | None


def read_identities(batch: engine.MultimodalInputs) -> list[Identity]:
    """The items of a batch that carries no pixels, as a decode worker gets it."""
    modality = _modality(batch.modality)
    places = batch.mm_placeholders
    if not places or len(batch.mm_hashes) < len(places):
        raise invalid(f"mm_inputs hold {len(batch.mm_hashes)} mm_hashes for {len(places)} items")
    name = f"{modality}_grid_thw"
    grids: list[Grid | None] = [None] * len(places)
    if name in batch.model_specific_tensors:
        grid = unpack(batch.model_specific_tensors[name], name, shared_memory=False)
        grids[:] = _grids({name: grid}, modality, len(places))
    return [
        Identity(modality, Placed(batch.mm_hashes[at], place.offset, place.length), grids[at])
        for at, place in enumerate(places)
    ]


def unpack(tensor: engine.TensorData, name: str, *, shared_memory: bool) -> npt.NDArray[Any]:
    """The array behind a TensorData; bfloat16 becomes float32.

    Refused with INVALID_ARGUMENT when bytes and shape disagree or the payload
    cannot be reached.
    """
    if tensor.dtype not in _DTYPES:
        raise invalid(f"{name}: dtype {tensor.dtype!r} is not understood")
    dtype = np.dtype(_DTYPES[tensor.dtype])
    payload = _payload(tensor, name, shared_memory=shared_memory)
    wanted = prod(tensor.shape) * dtype.itemsize
    if len(payload) != wanted:
        raise invalid(
            f"{name}: {len(payload)} bytes for shape {list(tensor.shape)} of {tensor.dtype}, "
            f"which takes {wanted}"
        )
    array = np.frombuffer(payload, dtype).reshape(tuple(tensor.shape))
    if tensor.dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array


def _payload(tensor: engine.TensorData, name: str, *, shared_memory: bool) -> bytes:
    match tensor.WhichOneof("payload"):
        case "inline":
            return tensor.inline
        case "shm" if shared_memory:
            return _read_segment(tensor.shm, name)
        case "shm":
            raise invalid(f"{name}: this worker shares no memory")
        case "remote":
            raise invalid(f"{name}: transport {tensor.remote.transport!r} is not supported")
    raise invalid(f"{name} has no payload")


def _read_segment(handle: common.ShmHandle, name: str) -> bytes:
    """Bytes of a shared-memory segment, which is gone after that, as with the real servicer."""
    segment = handle.name.lstrip("/")
    if not segment or "/" in segment or segment.startswith("."):
        raise invalid(f"{name}: not the name of a shared-memory segment")
    try:
        with (_SHM / segment).open("rb") as file:
            file.seek(handle.offset)
            content = file.read(handle.nbytes)
        (_SHM / segment).unlink(missing_ok=True)
        return content
    except OSError as error:
        raise invalid(f"{name}: the shared-memory segment cannot be read") from error


def _modality(modality: common.Modality) -> str:
    match modality:
        case common.MODALITY_UNSPECIFIED | common.IMAGE:
            return "image"
        case common.VIDEO:
            return "video"
    raise invalid("mm_inputs of this modality are not supported by the model")


def _grids(side: dict[str, npt.NDArray[Any]], modality: str, items: int) -> list[Grid]:
    grid = side.get(f"{modality}_grid_thw")
    if grid is None:
        raise EngineKilled(f"{modality}_grid_thw is missing")
    if grid.ndim != 2 or grid.shape[1] != 3 or len(grid) != items:
        raise EngineKilled(f"{modality}_grid_thw of shape {grid.shape} for {items} items")
    return [(int(t), int(h), int(w)) for t, h, w in grid]


def _check_pixels(values: npt.NDArray[Any], grids: list[Grid], family: Family) -> None:
    if values.ndim != 2 or values.shape[1] != family.pixel_width:
        raise EngineKilled(
            f"pixel_values of shape {values.shape}; a patch has {family.pixel_width} values"
        )
    patches = sum(prod(grid) for grid in grids)
    if patches != len(values):
        raise EngineKilled(f"{len(values)} patches where the grids count {patches}")
    merge = family.merge_size
    if any(t < 1 or h < merge or w < merge or h % merge or w % merge for t, h, w in grids):
        raise EngineKilled("a grid is not a multiple of the merge size")


def _check_sizes(
    batch: engine.MultimodalInputs, side: dict[str, npt.NDArray[Any]], grids: list[Grid]
) -> None:
    """The tensor by which the engine cuts the patches into items must count the grids' patches."""
    name = next(iter(batch.flat_keys.values()), None)
    sizes = side.get(name) if name is not None else None
    if sizes is None:
        raise EngineKilled("no tensor says how the patches are cut into items")
    if sizes.reshape(-1).tolist() != [prod(grid) for grid in grids]:
        raise EngineKilled(f"{name} does not match the grids")


def _fitting(
    ids: npt.NDArray[np.uint32], offset: int, length: int, modality: str, pad_ids: dict[str, int]
) -> int:
    """How many features the placeholder range takes up.

    A picture's range is the run of pad tokens itself; a video's also holds
    timestamps and start and end tokens, so there the pads are counted.
    """
    if offset + length > len(ids):
        raise EngineKilled(f"a placeholder ends at {offset + length} of {len(ids)} tokens")
    if modality == "image":
        return length
    return int(np.count_nonzero(ids[offset : offset + length] == pad_ids[modality]))
