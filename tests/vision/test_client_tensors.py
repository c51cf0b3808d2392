"""What docs/models.md asks of clients that make tensors is what the router makes itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from router.vision.plan import Modality, ModelSpec
from tests.vision.families import MODELS, spec_of
from tests.vision.pictures import golden
from tests.vision.test_video import spec as video_spec

TEXT = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
PROCESSORS = golden("processors.json")["families"]
WITH_VIDEO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def rows() -> dict[tuple[str, str], list[str]]:
    section = TEXT.split("## Tensors of a client's own\n")[1].split("\n## ")[0]
    cells = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    return {(family, media): told for family, media, *told in cells}


def specs() -> dict[tuple[str, Modality], ModelSpec]:
    made = [spec_of(name, PROCESSORS[name]["preprocessor_config"]) for name in MODELS]
    found: dict[tuple[str, Modality], ModelSpec] = {(spec.family, "image"): spec for spec in made}
    return found | {(name, "video"): video_spec(name) for name in WITH_VIDEO}


def test_every_family_is_listed() -> None:
    assert rows().keys() == specs().keys()


@pytest.mark.parametrize("key", specs(), ids="-".join)
def test_a_familys_row_is_what_its_batches_are_made_of(key: tuple[str, Modality]) -> None:
    spec, (small, flat, batched, on_cpu) = specs()[key], rows()[key]
    names = spec.tensor_names(key[1])
    shapes = {
        name: tuple(map(int, size.split(","))) if size else ()
        for name, size in re.findall(r"(\w+)(?: \[([\d,]+)\])?", small)
    }
    assert shapes == dict(spec.side_shapes(key[1]))
    assert [tuple(pair.split(": ")) for pair in filter(None, flat.split(", "))] == list(names.flat)
    assert tuple(filter(None, batched.split(", "))) == names.batched
    assert tuple(filter(None, on_cpu.split(", "))) == names.keep_on_cpu
    assert set(names.floats) <= {"second_per_grid_ts"}
