"""A router that a test does not care to configure."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.serving import Serving, serving
from workers.sim import SimOptions


@pytest.fixture
async def served() -> AsyncIterator[Serving]:
    """A router in front of one ordinary worker."""
    async with serving(SimOptions()) as running:
        yield running
