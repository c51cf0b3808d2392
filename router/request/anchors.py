"""Anchors in a prompt that the router does not expand itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router.faults import Fault, Reason
from router.request.plan import MediaItem
from router.vision.ids import among
from router.vision.plan import ModelSpec, anchors_amiss


def check_anchors(spec: ModelSpec, input_ids: Sequence[int], items: Sequence[MediaItem]) -> None:
    """One anchor an item, in the items' order of modalities. Raises `Fault` ANCHOR_MISMATCH.

    A worker expands what it finds: with an anchor too few it fails, with one
    too many, or with a run that was expanded already, it answers wrongly.
    """
    modality_of: dict[int, str] = {token: name for name, token in spec.anchor_ids.items()}
    ids = np.asarray(input_ids, dtype=np.uint32)
    positions = np.flatnonzero(among(ids, modality_of))
    if len(positions) == len(items) and all(
        modality_of[int(ids[at])] == item.modality
        for at, item in zip(positions, items, strict=True)
    ):
        return
    raise Fault(
        Reason.ANCHOR_MISMATCH,
        anchors_amiss(len(positions), len(items)),
        metadata={"found": str(len(positions)), "items": str(len(items))},
    )


def refuse_anchor_texts(anchor_texts: Sequence[str], text: str) -> None:
    """The same of a prompt that a worker turns into tokens. Raises `Fault` ANCHOR_MISMATCH."""
    found = sum(text.count(anchor) for anchor in anchor_texts)
    if found:
        raise Fault(
            Reason.ANCHOR_MISMATCH,
            f"text holds {found} media anchors, and media need a tokenized prompt",
            metadata={"found": str(found), "items": "0"},
        )


def refuse_anchors(spec: ModelSpec, input_ids: Sequence[int]) -> None:
    """A prompt without media must hold no anchor. Raises `Fault` ANCHOR_MISMATCH."""
    check_anchors(spec, input_ids, ())
