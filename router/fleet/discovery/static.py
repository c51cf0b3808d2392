"""Workers that are named once and for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence

from router.fleet.endpoint import Endpoint


class StaticDiscovery:
    """A fixed list. Whether its workers are up is for their probes to find out."""

    name = "static"

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)

    async def sets(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """See `Discovery.sets`."""
        yield self._endpoints
        await asyncio.Event().wait()
