"""Tensors are judged before they reach an engine.

A worker's engine dies for good on tensors that contradict each other, and
answers wrongly without a word on others, so every batch, our own or a client's,
passes here first. The check reads the small tensors and a sample of the pixels,
never all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from router.faults import Fault, Reason
from router.vision.ids import among
from router.vision.plan import Claim, DType, Modality, ModelSpec, PixelFormat
from router.vision.tensors import modality_of
from router.vision.values import from_bfloat16
from router.wire import engine

_PIXEL_DTYPES: Mapping[str, DType] = {
    name: name for name in ("uint8", "float32", "bfloat16", "float16")
}
_INTEGER_DTYPES = frozenset({"int64", "int32", "uint32"})
_FLOAT_DTYPES = frozenset({"float32", "float64"})
_MAX_RANK = 8
_MAX_TOKEN_ID = 2**32 - 1
_SAMPLE = 1024


@dataclass(frozen=True)
class WireLimits:
    """What the worker allows; 0, an absent modality or None is no limit."""

    item_limits: Mapping[str, int] = field(default_factory=dict)
    encoder_budget: int = 0
    context_length: int = 0
    pixels: PixelFormat | None = None


@dataclass(frozen=True)
class CheckedMedia:
    """What the check learned: items per modality, the largest item's embeddings, how the
    pixels travel (None when a float sample could be either kind), and, a batch each,
    how many rows of the pixel tensor every item has."""

    item_counts: tuple[tuple[Modality, int], ...]
    largest_item_tokens: int
    pixel_formats: tuple[PixelFormat | None, ...]
    item_rows: tuple[tuple[int, ...], ...]


def check_prompt_length(tokens: int, context_length: int) -> None:
    """Raise Fault PROMPT_TOO_LONG unless one output token still fits the context."""
    if context_length and tokens + 1 > context_length:
        raise Fault(
            Reason.PROMPT_TOO_LONG,
            f"the expanded prompt has {tokens} tokens; with one to generate that is over "
            f"the model's context of {context_length}",
            metadata={"tokens": str(tokens), "limit": str(context_length)},
        )


def check_mm_inputs(
    batches: Sequence[engine.MultimodalInputs],
    input_ids: Sequence[int] | npt.NDArray[np.uint32],
    spec: ModelSpec,
    limits: WireLimits,
    *,
    pixel_bytes: Sequence[int] | None = None,
) -> CheckedMedia:
    """Check the mm_inputs and extra_mm_inputs of one request against its model.

    `pixel_bytes` gives the payload sizes of batches whose pixels are not in the
    message yet. Raises Fault MALFORMED_TENSORS with metadata `check`,
    TOO_MANY_MEDIA_ITEMS, MEDIA_ITEM_OVER_ENCODER_BUDGET, PROMPT_TOO_LONG or
    MULTIMODAL_NOT_SUPPORTED.
    """
    ids = _token_ids(input_ids)
    check_prompt_length(len(ids), limits.context_length)
    counts: dict[Modality, int] = {}
    largest = 0
    formats: list[PixelFormat | None] = []
    rows: list[tuple[int, ...]] = []
    spans: list[tuple[int, int]] = []
    for position, batch in enumerate(batches):
        modality = _modality(batch, spec)
        if modality in counts:
            raise malformed("modality", f"two batches hold {modality} items")
        checker = _BatchCheck(batch, modality, spec, ids)
        counts[modality] = checker.items
        _check_item_limit(modality, checker.items, limits)
        outside = None if pixel_bytes is None else pixel_bytes[position]
        formats.append(checker.pixels(outside, limits.pixels))
        claims = checker.claims()
        for item, claim in enumerate(claims):
            _check_encoder_budget(item, claim.feature_tokens, limits)
            largest = max(largest, claim.feature_tokens)
        rows.append(tuple(claim.rows for claim in claims))
        spans += checker.spans
    _check_disjoint(spans)
    _check_all_covered(ids, spec, spans)
    return CheckedMedia(tuple(counts.items()), largest, tuple(formats), tuple(rows))


def malformed(check: str, message: str, **metadata: object) -> Fault:
    return Fault(
        Reason.MALFORMED_TENSORS,
        f"mm_inputs: {message}",
        metadata={"check": check, **{k: str(v) for k, v in metadata.items()}},
    )


class _BatchCheck:
    """One batch under examination; each method is one group of checks."""

    def __init__(
        self,
        batch: engine.MultimodalInputs,
        modality: Modality,
        spec: ModelSpec,
        ids: npt.NDArray[np.uint32],
    ) -> None:
        self._batch = batch
        self._modality = modality
        self._spec = spec
        self._ids = ids
        self._names = spec.tensor_names(modality)
        self._shape = tuple(batch.pixel_values.shape[: _MAX_RANK + 1])
        self.items = len(batch.mm_placeholders)
        self.spans = [(r.offset, r.length) for r in batch.mm_placeholders]
        if not 0 < self.items <= len(ids):
            raise malformed("placeholders", "a batch holds no item, or more than the prompt")
        if len(batch.mm_hashes) != self.items or not all(batch.mm_hashes):
            raise malformed(
                "hashes",
                f"{len(batch.mm_hashes)} hashes for {self.items} items; each needs one",
            )
        self._check_keys()
        self._side = self._read_side_tensors()

    def _check_keys(self) -> None:
        batch, names = self._batch, self._names
        token = self._spec.placeholder_ids[self._modality]
        if batch.HasField("im_token_id"):
            if batch.im_token_id != token:
                raise malformed("im_token_id", f"im_token_id is not the model's {token}")
        elif self._spec.interleaves(self._modality):
            # A worker would take every token of a range for a placeholder.
            raise malformed("im_token_id", f"im_token_id is missing, the model's is {token}")
        if batch.encoder_input_key not in ("", "pixel_values"):
            raise malformed("keys", "encoder_input_key is not pixel_values")
        if dict(batch.flat_keys) != dict(names.flat):
            raise malformed("keys", f"flat_keys are not {dict(names.flat)}")
        if set(batch.batched_keys) != set(names.batched):
            raise malformed("keys", f"batched_keys are not {list(names.batched)}")
        # A name of no tensor means nothing to a worker, and clients list some for good measure.
        kept = set(batch.keep_on_cpu_keys) & {"pixel_values", *batch.model_specific_tensors}
        if not kept <= {*names.batched, *names.keep_on_cpu}:
            raise malformed("keys", "keep_on_cpu_keys name tensors that are not small")

    def _read_side_tensors(self) -> dict[str, list[list[int]]]:
        """The small integer tensors as one list of numbers an item."""
        shapes = self._spec.side_shapes(self._modality)
        given = self._batch.model_specific_tensors
        missing = sorted(shapes.keys() - given.keys())
        shared = self._spec.shared_tensors(self._modality)
        unknown = sorted(given.keys() - shapes.keys() - shared)
        if missing:
            raise malformed("required_tensors", f"tensor {missing[0]} is missing")
        if unknown:
            raise malformed("required_tensors", f"{len(unknown)} tensors are not the model's")
        for name in shared & given.keys():
            # Nothing but the placeholder's id is shared so far.
            expected = self._spec.placeholder_ids[self._modality]
            _check_inline(given[name], name)
            if given[name].dtype != "int64" or given[name].inline != expected.to_bytes(8, "little"):
                raise malformed("values", f"tensor {name} is not {expected}")
        side: dict[str, list[list[int]]] = {}
        for name, entry in shapes.items():
            tensor = given[name]
            _check_inline(tensor, name)
            floats = name in self._names.floats
            if tensor.dtype not in (_FLOAT_DTYPES if floats else _INTEGER_DTYPES):
                kind = "a float" if floats else "an integer"
                raise malformed("dtype", f"tensor {name} is not of {kind} dtype")
            if tuple(tensor.shape[: _MAX_RANK + 1]) != (self.items, *entry):
                raise malformed("shape", f"tensor {name} has not the shape of {self.items} items")
            dtype = np.dtype(tensor.dtype).newbyteorder("<")
            if len(tensor.inline) != self.items * prod(entry) * dtype.itemsize:
                raise malformed("payload_size", f"tensor {name} has not the size of its shape")
            values = np.frombuffer(tensor.inline, dtype).reshape(self.items, -1)
            if floats:
                if not bool((np.isfinite(values) & (values > 0)).all()):
                    raise malformed("values", f"tensor {name} is not positive")
                continue
            side[name] = [[int(v) for v in row] for row in values]
        return side

    def pixels(self, outside: int | None, wanted: PixelFormat | None) -> PixelFormat | None:
        """Check the pixel tensor's form; how it travels, where that can be told."""
        tensor = self._batch.pixel_values
        dtype = _PIXEL_DTYPES.get(tensor.dtype)
        if dtype is None:
            raise malformed("dtype", "pixel_values have a dtype that is not for pixels")
        dims = self._names.pixel_dims
        inner = self._shape[1:]
        if len(inner) != len(dims) or any(
            size < 1 or (dim and size != dim) for size, dim in zip(inner, dims, strict=True)
        ):
            raise malformed("pixel_dim", f"rows of pixel_values are not of shape {dims}")
        if outside is None:
            _check_inline(tensor, "pixel_values")
        size = len(tensor.inline) if outside is None else outside
        if size != prod(self._shape) * PixelFormat(dtype, False).itemsize:
            raise malformed(
                "payload_size", "pixel_values have not the size of their shape", bytes=size
            )
        if dtype == "uint8":
            found: PixelFormat | None = PixelFormat("uint8", normalized=False)
        else:
            found = _told_by_sample(tensor.inline, dtype) if outside is None else None
        if wanted is not None and found is not None and found.normalized != wanted.normalized:
            needs, has = ("normalised", "raw") if wanted.normalized else ("raw", "normalised")
            raise malformed("normalize", f"the worker takes {needs} pixels and these are {has}")
        return found

    def claims(self) -> list[Claim]:
        """What each item claims to be, after rows and ranges were checked against it."""
        claims: list[Claim] = []
        for item in range(self.items):
            entries = {name: values[item] for name, values in self._side.items()}
            try:
                claim = self._spec.claim(self._modality, entries, self._shape)
            except ValueError as error:
                raise malformed("grid", f"item {item}: {error}", index=item) from error
            claims.append(claim)
            self._check_range(item, claim.feature_tokens)
        rows = sum(claim.rows for claim in claims)
        if rows != self._shape[0]:
            raise malformed(
                "rows", f"pixel_values have {self._shape[0]} rows, the items account for {rows}"
            )
        return claims

    def _check_range(self, item: int, feature_tokens: int) -> None:
        offset, length = self.spans[item]
        end = offset + length
        if end > len(self._ids):
            raise malformed("range", f"the range of item {item} leaves the prompt", index=item)
        if item and offset < sum(self.spans[item - 1]):
            raise malformed("range", f"the range of item {item} is out of order", index=item)
        inside = self._ids[offset:end] == self._spec.placeholder_ids[self._modality]
        found = int(np.count_nonzero(inside))
        # Some families write other tokens between the placeholders of one item.
        covered = found if self._spec.interleaves(self._modality) else length
        if found != feature_tokens or covered != feature_tokens or not length:
            raise malformed(
                "length",
                f"the range of item {item} covers {length} tokens and {found} placeholders, "
                f"the item has {feature_tokens}",
                index=item,
                expected=feature_tokens,
                found=found,
            )


def _token_ids(input_ids: Sequence[int] | npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    ids = np.asarray(input_ids)
    if ids.dtype == np.uint32:
        return ids
    if ids.size and (
        ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) > _MAX_TOKEN_ID
    ):
        raise malformed("input_ids", "input_ids are not token ids")
    return ids.astype(np.uint32)


def _modality(batch: engine.MultimodalInputs, spec: ModelSpec) -> Modality:
    modality = modality_of(batch)
    if modality is None:
        raise malformed("modality", "modality is neither image nor video")
    if modality not in spec.modalities:
        raise Fault(
            Reason.MULTIMODAL_NOT_SUPPORTED,
            f"{spec.family} takes no {modality}",
            metadata={"modality": modality},
        )
    return modality


def _check_inline(tensor: engine.TensorData, name: str) -> None:
    kind = tensor.WhichOneof("payload")
    if kind is None:
        raise malformed("payload", f"{name} has no payload")
    if kind != "inline":
        raise malformed("payload", f"{name} must come inline, not as {kind}")


def _check_item_limit(modality: Modality, items: int, limits: WireLimits) -> None:
    limit = limits.item_limits.get(modality)
    if limit is not None and items > limit:
        raise Fault(
            Reason.TOO_MANY_MEDIA_ITEMS,
            f"the request has {items} {modality} items; the model takes at most {limit}",
            metadata={"modality": modality, "items": str(items), "limit": str(limit)},
        )


def _check_encoder_budget(item: int, tokens: int, limits: WireLimits) -> None:
    if limits.encoder_budget and tokens > limits.encoder_budget:
        raise Fault.of_item(
            Reason.MEDIA_ITEM_OVER_ENCODER_BUDGET,
            item,
            f"it has {tokens} feature tokens; the encoder takes at most "
            f"{limits.encoder_budget} for one item",
            tokens=tokens,
            limit=limits.encoder_budget,
        )


def _check_disjoint(spans: list[tuple[int, int]]) -> None:
    ordered = sorted(spans)
    for (offset, length), (following, _) in pairwise(ordered):
        if offset + length > following:
            raise malformed("range", "the ranges of two items overlap")


def _check_all_covered(
    ids: npt.NDArray[np.uint32],
    spec: ModelSpec,
    spans: list[tuple[int, int]],
) -> None:
    """No placeholder token of any modality may stand outside the ranges."""
    uncovered = among(ids, set(spec.placeholder_ids.values()))
    for offset, length in spans:
        uncovered[offset : offset + length] = False
    stray = int(np.count_nonzero(uncovered))
    if stray:
        raise malformed("uncovered", f"{stray} placeholder tokens belong to no item", found=stray)


def _told_by_sample(payload: bytes, dtype: DType) -> PixelFormat | None:
    """Raw or normalised, from a sample of float pixels; None when it could be both.

    Raw pixels are whole numbers of 0 to 255. Normalised ones are small, and some
    are negative or broken.
    """
    stored = np.frombuffer(payload, np.dtype("<u2") if dtype == "bfloat16" else np.dtype(dtype))
    sample = stored[:: max(1, len(stored) // _SAMPLE)]
    values = from_bfloat16(sample) if dtype == "bfloat16" else sample.astype(np.float32)
    if not bool(np.isfinite(values).all()):
        raise malformed("values", "pixel_values are not all finite")
    whole = bool(((values >= 0) & (values <= 255) & (values == np.rint(values))).all())
    if not whole:
        return PixelFormat(dtype, normalized=True)
    return PixelFormat(dtype, normalized=False) if bool((values > 16).any()) else None
