"""One modality's batch on the wire.

A pixel payload is tens of megabytes, so it is copied exactly once: everything
else of a request is serialised by protobuf, and the batch is appended to it by
hand-written field prefixes with the payload behind them. On the wire the order
of fields is free, so a parser sees one ordinary message.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from router.vision.plan import ItemPlan, Modality, ModelSpec, PixelFormat
from router.wire import common, engine

_LENGTH_DELIMITED = 2
_MM_INPUTS = engine.GenerateRequest.MM_INPUTS_FIELD_NUMBER
_EXTRA_MM_INPUTS = engine.GenerateRequest.EXTRA_MM_INPUTS_FIELD_NUMBER
_PIXEL_VALUES = engine.MultimodalInputs.PIXEL_VALUES_FIELD_NUMBER
_INLINE = engine.TensorData.INLINE_FIELD_NUMBER

# PyBytes_FromStringAndSize(NULL, size): a new object whose content is yet to be written.
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyBytes_AsString", ctypes.pythonapi)
)

MODALITIES: Mapping[Modality, common.Modality] = {
    "image": common.Modality.IMAGE,
    "video": common.Modality.VIDEO,
}


def modality_of(batch: engine.MultimodalInputs) -> Modality | None:
    """What a batch is of; None where it is neither image nor video."""
    return next((name for name, number in MODALITIES.items() if batch.modality == number), None)


@dataclass(frozen=True)
class Batch:
    """One modality's MultimodalInputs with its pixels still beside it.

    `head` has everything but the pixels' bytes; `payload` are those, as
    C-contiguous arrays that follow one another.
    """

    head: engine.MultimodalInputs
    payload: tuple[npt.NDArray[Any], ...]

    @property
    def payload_bytes(self) -> int:
        return sum(part.nbytes for part in self.payload)

    def message(self) -> engine.MultimodalInputs:
        """The whole batch as a message; copies the pixels twice."""
        whole = engine.MultimodalInputs()
        whole.CopyFrom(self.head)
        whole.pixel_values.inline = b"".join(_flat_views(self.payload))
        return whole


def build_batch(
    spec: ModelSpec,
    plans: Sequence[ItemPlan],
    arrays: Sequence[npt.NDArray[Any]],
    pixel_format: PixelFormat,
    ranges: Sequence[tuple[int, int]],
    hashes: Sequence[str],
) -> Batch:
    """The batch of items of one modality, in prompt order.

    `arrays` are `ModelSpec.pack`'s, `ranges` those of `ModelSpec.expand` and
    `hashes` the items' identities. Raises ValueError when the lists differ in
    length or mix modalities.
    """
    if not plans or not len(plans) == len(arrays) == len(ranges) == len(hashes):
        raise ValueError("a batch needs one plan, array, range and hash an item")
    modality = plans[0].modality
    if any(plan.modality != modality for plan in plans):
        raise ValueError("a batch holds one modality")
    names = spec.tensor_names(modality)
    shape, payload = join(arrays)
    head = engine.MultimodalInputs(
        modality=MODALITIES[modality],
        im_token_id=spec.placeholder_ids[modality],
        mm_hashes=hashes,
        batched_keys=names.batched,
        flat_keys=dict(names.flat),
        keep_on_cpu_keys=names.keep_on_cpu,
    )
    head.pixel_values.shape.extend(shape)
    head.pixel_values.dtype = pixel_format.dtype
    for offset, length in ranges:
        head.mm_placeholders.add(offset=offset, length=length)
    for name, values in spec.side_tensors(plans).items():
        head.model_specific_tensors[name].CopyFrom(small_tensor(values))
    return Batch(head, payload)


def join(
    arrays: Sequence[npt.NDArray[Any]],
) -> tuple[tuple[int, ...], tuple[npt.NDArray[Any], ...]]:
    """The shape of all items along the first dimension, and contiguous parts of it.

    Items of different shape are padded with zeros at the end of each dimension
    (those alone are copied), as the reference processors pad a batch.
    """
    inner = tuple(max(sizes) for sizes in zip(*(a.shape[1:] for a in arrays), strict=True))
    parts = tuple(np.ascontiguousarray(_padded(a, inner)) for a in arrays)
    return (sum(len(a) for a in arrays), *inner), parts


def serialize(rest: engine.GenerateRequest, batches: Sequence[Batch]) -> bytes:
    """`rest` with `batches` as its mm_inputs and extra_mm_inputs, as wire bytes.

    `rest` must hold neither field itself. Each pixel is copied once, without the
    interpreter lock.
    """
    pieces = [np.frombuffer(rest.SerializeToString(), np.uint8)]
    for position, batch in enumerate(batches):
        prefix = _prefix(batch, _EXTRA_MM_INPUTS if position else _MM_INPUTS)
        pieces.append(np.frombuffer(prefix, np.uint8))
        pieces += [array.reshape(-1).view(np.uint8) for array in batch.payload]
    return _joined(pieces)


def _joined(pieces: Sequence[npt.NDArray[np.uint8]]) -> bytes:
    """The bytes of flat `pieces`, one after the other.

    `b"".join` keeps the interpreter lock for pieces that are not bytes, which
    for 70 MB is 10 ms and more. So the bytes are made as extension modules
    make them: first the object, then its content, before anybody sees it.
    """
    size = sum(len(piece) for piece in pieces)
    joined: bytes = _new_bytes(None, size)
    if size:
        room = memoryview((ctypes.c_ubyte * size).from_address(_address_of(joined))).cast("B")
        np.concatenate(pieces, out=np.frombuffer(room, np.uint8))
    return joined


def small_tensor(values: npt.NDArray[Any]) -> engine.TensorData:
    """A TensorData with its values inline, little-endian and row-major."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return engine.TensorData(shape=values.shape, dtype=values.dtype.name, inline=little.tobytes())


def _prefix(batch: Batch, field: int) -> bytes:
    """All of `batch` but the payload, framed as element `field` of a GenerateRequest.

    The pixels' own TensorData comes last, and in it the payload.
    """
    head = engine.MultimodalInputs()
    head.CopyFrom(batch.head)
    tensor = head.pixel_values.SerializeToString()
    head.ClearField("pixel_values")
    rest = head.SerializeToString()
    payload = _tag(_INLINE) + _varint(batch.payload_bytes)
    pixels_length = len(tensor) + len(payload) + batch.payload_bytes
    pixels = _tag(_PIXEL_VALUES) + _varint(pixels_length)
    length = len(rest) + len(pixels) + pixels_length
    return b"".join((_tag(field), _varint(length), rest, pixels, tensor, payload))


def _tag(field: int) -> bytes:
    return _varint(field << 3 | _LENGTH_DELIMITED)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _flat_views(arrays: Iterable[npt.NDArray[Any]]) -> list[memoryview]:
    return [array.reshape(-1).view(np.uint8).data for array in arrays]


def _padded(array: npt.NDArray[Any], inner: tuple[int, ...]) -> npt.NDArray[Any]:
    if array.shape[1:] == inner:
        return array
    padded = np.zeros((len(array), *inner), array.dtype)
    padded[tuple(slice(0, size) for size in array.shape)] = array
    return padded
