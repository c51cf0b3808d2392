"""Making the fleet what the sources say it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing

from router.fleet.discovery.base import Discovery
from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker, WorkerState
from router.observe.logging import get_logger

_log = get_logger("discovery")

# Pause before a source that failed for a reason of ours is started again.
_RESTART_PAUSE = 1.0


class Reconciler:
    """Adds, replaces and drains workers until the fleet is the union of all sources.

    Workers that were added by command belong to no source and are left alone.
    One that a source lists and that was drained or removed by command comes
    back only when the source has dropped it in between.
    """

    def __init__(self, fleet: Fleet, sources: Iterable[Discovery]) -> None:
        self._fleet = fleet
        self._sources = list(sources)
        self._sets: dict[str, tuple[Endpoint, ...]] = {}
        # What the fleet was last asked to be, and the workers admitted for it.
        self._listed: dict[str, Endpoint] = {}

    async def run(self) -> None:
        """Follows every source until cancelled."""
        async with asyncio.TaskGroup() as group:
            for position, source in enumerate(self._sources):
                group.create_task(self._follow(f"{position} {source.name}", source))

    async def _follow(self, key: str, source: Discovery) -> None:
        while True:
            try:
                async with aclosing(source.sets()) as sets:
                    async for endpoints in sets:
                        self.take(key, endpoints)
            except Exception as error:
                _log.error("discovery_failed", source=source.name, exc_info=error)
            await asyncio.sleep(_RESTART_PAUSE)

    def take(self, key: str, endpoints: Sequence[Endpoint]) -> None:
        """One source's whole set; the fleet is made to fit in the same step.

        What fails in it is done the next time: a set is noted when it is the fleet.
        """
        if self._sets.get(key) == tuple(endpoints):
            return
        sets = self._sets | {key: tuple(endpoints)}
        wanted: dict[str, Endpoint] = {}
        for listed in sets.values():
            for endpoint in listed:
                wanted.setdefault(endpoint.address, endpoint)
        before = self._listed
        added = [a for a in wanted if a not in before]
        dropped = [a for a in before if a not in wanted]
        for address in dropped:
            present = self._standing(address)
            if present is not None:
                self._fleet.drain(present, "gone from discovery")
        for address in added:
            if self._standing(address) is None:
                self._fleet.admit(wanted[address])
        for address in wanted.keys() & before.keys():
            self._update(wanted[address], before[address])
        self._sets, self._listed = sets, wanted
        if added or dropped:
            _log.info("discovery", source=key, workers=len(wanted), added=added, dropped=dropped)

    def _update(self, endpoint: Endpoint, before: Endpoint) -> None:
        present = self._standing(endpoint.address)
        if endpoint == before or present is None:
            return
        if endpoint.same_purpose(present.endpoint):
            present.endpoint = endpoint
        else:
            self._fleet.replace(present, "its role or model has changed", endpoint)

    def _standing(self, address: str) -> Worker | None:
        present = self._fleet.registry.get(address)
        return None if present is None or present.state is WorkerState.DRAINING else present
