"""Models that workers share, and how long one is kept."""

from __future__ import annotations

import asyncio
import gc
import io
import zipfile

import pytest

from router.fleet.bundle import TokenizerBundle
from router.fleet.model import ModelLibrary
from tests.fleet.stand_in import CAPABILITY
from workers.sim import SimOptions
from workers.sim.bundle import model_files


def bundle(year: int = 2026, **changed: bytes) -> TokenizerBundle:
    """A model's archive, as it is packed in some year, with some files changed."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as writer:
        for name, content in sorted((model_files(SimOptions()) | changed).items()):
            writer.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), content)
    return TokenizerBundle.from_archive(packed.getvalue())


async def test_equal_workers_that_come_at_once_share_a_model() -> None:
    library = ModelLibrary()
    models = await asyncio.gather(*(library.model(CAPABILITY, bundle()) for _ in range(8)))
    assert len({id(model) for model in models}) == 1


async def test_archives_of_the_same_files_are_one_model() -> None:
    library = ModelLibrary()
    first, second = bundle(2025), bundle(2026)
    assert first.sha256 != second.sha256
    assert await library.model(CAPABILITY, first) is await library.model(CAPABILITY, second)


async def test_other_files_are_another_model() -> None:
    library = ModelLibrary()
    first = await library.model(CAPABILITY, bundle())
    second = await library.model(CAPABILITY, bundle(chat_template=b"another"))
    assert first is not second
    assert first.fingerprint == second.fingerprint, "that file decides no tensor"
    assert len(library) == 2


@pytest.mark.parametrize("config", [b"", b"[", b"[" * 100_000, b"[]", b'{"eos_token_id": "x"}'])
async def test_a_generation_config_that_cannot_be_read_names_no_ends(config: bytes) -> None:
    files = bundle(**{"generation_config.json": config})
    assert (await ModelLibrary().model(CAPABILITY, files)).end_ids == frozenset()


async def test_a_model_that_nobody_has_any_more_is_forgotten() -> None:
    library = ModelLibrary()
    former = await library.model(CAPABILITY, bundle(chat_template=b"of last year"))
    present = await library.model(CAPABILITY, bundle())
    assert len(library) == 2
    del former
    gc.collect()
    assert len(library) == 1
    assert await library.model(CAPABILITY, bundle()) is present
