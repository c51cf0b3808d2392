"""How one of several admissible workers is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class RoutingView:
    """What a policy may know of a request.

    `prompt_tokens` is the expanded length, estimated where the router does
    not expand the prompt itself. `routing_key` is the client's own, or empty.
    """

    prompt_tokens: int
    routing_key: str = ""


class Candidate(Protocol):
    """What a policy may know of a worker."""

    @property
    def address(self) -> str: ...

    @property
    def expected_wait(self) -> float:
        """Seconds until a new request would start, as well as it can be told."""


class Policy(Protocol):
    """A way to choose; it may keep state, and is called from one thread.

    Choosing changes nothing, so that `explain` can ask too; what follows from
    a choice is told to `reserved`, in the same uninterrupted step.
    """

    name: str

    def choose(self, view: RoutingView, candidates: Sequence[Candidate]) -> int:
        """The position of the chosen one in `candidates`, which are never empty."""

    def reserved(self, view: RoutingView, candidate: Candidate) -> None:
        """The request was given to `candidate`."""
