"""Picture sizes of references that are not fetched, from the first bytes alone.

For a policy that wants to know how long a prompt will be in the worker. PNG,
WebP and GIF say it in the first kilobyte, JPEG somewhere before its pixels.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from router.faults import Fault
from router.media.fetch import Fetcher
from router.media.flight import SingleFlight
from router.media.signed import object_name
from router.media.sniff import size_from_prefix
from router.media.store import Counters
from router.media.url import MediaUrl

# Bytes that are asked for, one after the other while the size is not among them.
_STEPS = (4 << 10, 64 << 10)

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """At most `entries` are kept. `patience` is for one look and `retry_after` the
    time until another one at a reference that did not tell, both in seconds.
    """

    entries: int = 100_000
    patience: float = 1.0
    retry_after: float = 60.0


class Sizes:
    """Upright (width, height) by reference; a signature makes no other reference of it.

    An estimate: what is behind the reference may change, and nobody asks again.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        limits: SizeLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetcher = fetcher
        self._limits = limits or SizeLimits()
        self._clock = clock
        # In order of use; a size that is not known until when.
        self._kept: OrderedDict[str, Size | float] = OrderedDict()
        self._flights: SingleFlight[Size | None] = SingleFlight()
        self.counters = Counters()

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, url: MediaUrl, *, index: int) -> Size | None:
        """The size behind an http or https reference that was judged; None where it is not told.

        Never raises for what the host does.
        """
        name = object_name(url)
        kept = self._kept.get(name)
        if isinstance(kept, tuple) or (kept is not None and self._clock() < kept):
            self._kept.move_to_end(name)
            self.counters.hits += 1
            return kept if isinstance(kept, tuple) else None
        self.counters.misses += 1
        async with self._flights.join(name, lambda: self._look(name, url, index)) as size:
            return size

    async def close(self) -> None:
        """Ends running looks."""
        await self._flights.close()

    async def _look(self, name: str, url: MediaUrl, index: int) -> Size | None:
        size = None
        try:
            async with asyncio.timeout(self._limits.patience):
                size = await self._ask(url, index)
        except (Fault, TimeoutError):
            pass  # whoever fetches it in earnest will say what is wrong
        self._kept[name] = size or self._clock() + self._limits.retry_after
        self._kept.move_to_end(name)
        while len(self._kept) > self._limits.entries:
            self._kept.popitem(last=False)
        return size

    async def _ask(self, url: MediaUrl, index: int) -> Size | None:
        for nbytes in _STEPS:
            data = await self._fetcher.beginning(url, index=index, nbytes=nbytes)
            size = size_from_prefix(data)
            if size is not None or len(data) < nbytes:
                return size
        return None
