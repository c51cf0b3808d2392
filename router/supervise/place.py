"""What a router process is told by its supervisor: which of how many it is, and where they meet."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from router import config
from router.config import Settings


@dataclass(frozen=True)
class Place:
    """One process' place among its siblings.

    `folder` is the supervisor's own, for no other user to enter: the sockets
    in it ask for no token. A `replacement` takes no connections before it has
    workers, since its siblings serve meanwhile.
    """

    number: int
    processes: int
    folder: str
    replacement: bool = False

    @property
    def http(self) -> str:
        """Where this process serves metrics and readiness to the supervisor."""
        return f"unix:{self.folder}/{self.number}.http"

    def grpc(self, number: int) -> str:
        """Where process `number` takes its siblings' calls."""
        return f"unix:{self.folder}/{number}.grpc"

    @property
    def siblings(self) -> list[int]:
        """The numbers of the others."""
        return [number for number in range(self.processes) if number != self.number]


def told(place: Place, settings: Settings) -> bytes:
    """The line that a process reads when it starts."""
    line = {"place": asdict(place), "settings": settings.model_dump(mode="json", exclude_none=True)}
    return json.dumps(line).encode() + b"\n"


def heard(line: bytes) -> tuple[Place, Settings]:
    """What `told` wrote. Raises ValueError for anything else."""
    read: dict[str, Any] = json.loads(line)
    return Place(**read["place"]), config.load(read["settings"])
