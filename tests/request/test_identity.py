"""Whether a prefill worker has said what its references became."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from router.request.identity import identifies
from router.vision.plan import ModelSpec
from router.wire import common, engine
from tests.vision.families import spec_of
from tests.vision.pictures import golden


@cache
def qwen() -> ModelSpec:
    processor = golden("processors.json")["families"]["qwen3_vl"]
    return spec_of("qwen3_vl", processor["preprocessor_config"])


def referring(items: int) -> engine.GenerateRequest:
    anchor = qwen().anchor_ids["image"]
    request = engine.GenerateRequest()
    request.tokenized.input_ids.extend([5, *[anchor, 6] * items])
    for at in range(items):
        request.media_refs.items.add(modality=common.IMAGE, url=f"http://h/{at}")
    return request


def identity(*hashes: str, dtype: str = "int64") -> engine.MediaIdentity:
    """Of `referring`, with pictures of 4x4 patches, which are 4 tokens."""
    pad = qwen().placeholder_ids["image"]
    told = engine.MediaIdentity(prompt_token_ids=[5, *[pad, pad, pad, pad, 6] * len(hashes)])
    batch = told.mm_inputs
    batch.modality = common.IMAGE
    batch.mm_hashes.extend(hashes)
    for at, _ in enumerate(hashes):
        batch.mm_placeholders.add(offset=1 + 5 * at, length=4)
    grids = np.tile([1, 4, 4], (len(hashes), 1)).astype(dtype)
    batch.model_specific_tensors["image_grid_thw"].CopyFrom(
        engine.TensorData(shape=grids.shape, dtype=dtype, inline=grids.tobytes())
    )
    return told


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("items", [1, 2])
def test_a_whole_identity(items: int, known: bool) -> None:
    told = identity(*"ab"[:items])
    assert identifies(told, referring(items), qwen() if known else None)


def test_grids_may_be_of_any_integer_kind() -> None:
    assert identifies(identity("a", dtype="int32"), referring(1), qwen())


Damage = Callable[[engine.MediaIdentity], object]

# What is wrong whatever the model is.
NOT_NAMED: dict[str, Damage] = {
    "nothing at all": lambda told: told.Clear(),
    "bare token ids": lambda told: told.ClearField("mm_inputs"),
    "an item less": lambda told: (
        told.mm_inputs.mm_hashes.pop(),
        told.mm_inputs.mm_placeholders.pop(),
    ),
    "a hash less": lambda told: told.mm_inputs.mm_hashes.pop(),
    "an empty hash": lambda told: told.mm_inputs.mm_hashes.__setitem__(1, ""),
    "a further batch": lambda told: told.extra_mm_inputs.add(mm_hashes=["c"]).mm_placeholders.add(
        offset=0, length=1
    ),
    "no token": lambda told: setattr(told.mm_inputs.mm_placeholders[0], "length", 0),
    "out of the prompt": lambda told: setattr(told.mm_inputs.mm_placeholders[1], "offset", 8),
    "one over the other": lambda told: setattr(told.mm_inputs.mm_placeholders[1], "offset", 3),
}
# What only a model's specification tells.
NOT_THE_MODEL_S: dict[str, Damage] = {
    "no grid": lambda told: told.mm_inputs.model_specific_tensors.clear(),
    "the grid of one": lambda told: told.mm_inputs.model_specific_tensors[
        "image_grid_thw"
    ].shape.__setitem__(0, 1),
    "half a grid": lambda told: setattr(
        told.mm_inputs.model_specific_tensors["image_grid_thw"], "inline", bytes(24)
    ),
    "a grid of nothing": lambda told: setattr(
        told.mm_inputs.model_specific_tensors["image_grid_thw"], "inline", bytes(48)
    ),
    "a grid of floats": lambda told: setattr(
        told.mm_inputs.model_specific_tensors["image_grid_thw"], "dtype", "float64"
    ),
    "no modality": lambda told: told.mm_inputs.ClearField("modality"),
    "too short a range": lambda told: setattr(told.mm_inputs.mm_placeholders[0], "length", 3),
    "a token beside": lambda told: setattr(told.mm_inputs.mm_placeholders[0], "offset", 2),
    "unexpanded ids": lambda told: told.prompt_token_ids.__delitem__(slice(1, 4)),
    "another prompt": lambda told: told.prompt_token_ids.__setitem__(5, 7),
    "a longer prompt": lambda told: told.prompt_token_ids.append(9),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("damage", NOT_NAMED.values(), ids=NOT_NAMED)
def test_an_item_without_name_or_place(damage: Damage, known: bool) -> None:
    told = identity("a", "b")
    damage(told)
    assert not identifies(told, referring(2), qwen() if known else None)


@pytest.mark.parametrize("damage", NOT_THE_MODEL_S.values(), ids=NOT_THE_MODEL_S)
def test_what_the_model_could_not_have_made(damage: Damage) -> None:
    told = identity("a", "b")
    damage(told)
    assert not identifies(told, referring(2), qwen())


def test_a_prompt_that_was_to_be_cut_is_not_compared() -> None:
    told, request = identity("a"), referring(1)
    request.tokenized.input_ids.insert(0, 4)
    assert not identifies(told, request, qwen())
    request.sampling_params.truncate_prompt_tokens = 6
    assert identifies(told, request, qwen())


def test_items_of_all_modalities_count() -> None:
    told, request = identity("a"), referring(1)
    request.media_refs.items.add(modality=common.VIDEO, url="http://h/v")
    assert not identifies(told, request)
    told.extra_mm_inputs.add(mm_hashes=["v"]).mm_placeholders.add(offset=5, length=1)
    assert identifies(told, request)
