"""What a source of workers is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from router.fleet.endpoint import Endpoint


class Discovery(Protocol):
    """A source of workers.

    It never tells what has changed, only ever the whole set, so that nothing
    missed in between can leave a trace. Trouble in finding out is not an empty
    set: the source says so in the log, and the last good set stays.
    """

    name: str

    def sets(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """The whole set: as soon as it is known, and at least after every change of it."""
