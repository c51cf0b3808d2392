"""Judging what a prefill worker says its references have become.

The decode leg's request is made of it, and an engine takes that on trust: where
it names too little the decode leg would answer for another picture, or for none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from router.vision.ids import among
from router.vision.plan import Modality, ModelSpec
from router.vision.tensors import modality_of
from router.wire import engine

# Ends the names of tensors that positions follow from.
_GRID = "_grid_thw"
_INTEGERS = frozenset({"int64", "int32", "uint32"})


def identifies(
    identity: engine.MediaIdentity, request: engine.GenerateRequest, spec: ModelSpec | None = None
) -> bool:
    """Whether an identity names every media item of a request with references: what it is,
    where it stands, and for a model that is known also that it stands there alone, in the
    request's own prompt, with the grid that its positions follow from.
    """
    batches = [identity.mm_inputs, *identity.extra_mm_inputs]
    ids = np.array(identity.prompt_token_ids, np.uint32)
    spans = [(r.offset, r.offset + r.length) for b in batches for r in b.mm_placeholders]
    named = (
        len(spans) == len(request.media_refs.items)
        and all(len(b.mm_hashes) == len(b.mm_placeholders) and all(b.mm_hashes) for b in batches)
        and all(begin < end <= len(ids) for begin, end in spans)
        and all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))
    )
    return named and (spec is None or _as_the_model_has_it(batches, ids, request, spec))


def _as_the_model_has_it(
    batches: Sequence[engine.MultimodalInputs],
    ids: npt.NDArray[np.uint32],
    request: engine.GenerateRequest,
    spec: ModelSpec,
) -> bool:
    outside = np.ones(len(ids), bool)
    interleaved = False
    for batch in batches:
        modality = modality_of(batch)
        if modality is None or modality not in spec.modalities:
            return False
        interleaved |= spec.interleaves(modality)
        if not all(_has_grid(batch, name, entry) for name, entry in _grids(spec, modality)):
            return False
        for place in batch.mm_placeholders:
            inside = slice(place.offset, place.offset + place.length)
            own = ids[inside] == spec.placeholder_ids[modality]
            if not (own.any() if spec.interleaves(modality) else own.all()):
                return False
            outside[inside] = False
    if (outside & among(ids, set(spec.placeholder_ids.values()))).any():
        return False  # placeholders that belong to no item
    # Where a range holds more than placeholders it may replace more than an anchor.
    return interleaved or _same_prompt(ids[outside], request, spec)


def _same_prompt(
    around: npt.NDArray[np.uint32], request: engine.GenerateRequest, spec: ModelSpec
) -> bool:
    """Whether the tokens around the media are those of the request around its anchors."""
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        return True
    asked = np.array(request.tokenized.input_ids, np.uint32)
    return np.array_equal(around, asked[~among(asked, set(spec.anchor_ids.values()))])


def _grids(spec: ModelSpec, modality: Modality) -> Iterable[tuple[str, tuple[int, ...]]]:
    shapes = spec.side_shapes(modality)
    return ((name, entry) for name, entry in shapes.items() if name.endswith(_GRID))


def _has_grid(batch: engine.MultimodalInputs, name: str, entry: tuple[int, ...]) -> bool:
    """Whether there is such a tensor with an entry for each item, all of it positive."""
    if name not in batch.model_specific_tensors:
        return False
    tensor = batch.model_specific_tensors[name]
    shape = (len(batch.mm_placeholders), *entry)
    if tensor.dtype not in _INTEGERS or tuple(tensor.shape) != shape:
        return False
    dtype = np.dtype(tensor.dtype).newbyteorder("<")
    if len(tensor.inline) != prod(shape) * dtype.itemsize:
        return False
    return bool((np.frombuffer(tensor.inline, dtype) > 0).all())
