"""A router that a test does not care to configure, and what all of them need."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator

import pytest

from router.media import sizes
from tests.serving import PATIENCE, Serving, serving
from workers.sim import SimOptions


@pytest.fixture
async def served() -> AsyncIterator[Serving]:
    """A router in front of one ordinary worker."""
    async with serving(SimOptions()) as running:
        yield running


@pytest.fixture(autouse=True)
def patient_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of pictures are waited for, however slow the machine that tells them."""
    patient = functools.partial(sizes.SizeLimits, patience=PATIENCE)
    monkeypatch.setattr(sizes, "SizeLimits", patient)
