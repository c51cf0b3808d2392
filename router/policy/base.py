"""How one of several admissible workers is chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.prefix.blocks import Keys


class Blocks(Protocol):
    """A prompt's KV blocks; computed when asked for, kept for the next question.

    `exact` is False where media go by another identity than the worker will
    report, such as that of a URL the router has not looked behind: then blocks
    with media match our own decisions, and no worker's reports.
    """

    @property
    def exact(self) -> bool: ...

    def keys(self, block_size: int) -> Keys:
        """Keys of the full blocks of so many tokens, uint64 [blocks]."""


@dataclass(frozen=True)
class RoutingView:
    """What a policy may know of a request.

    `prompt_tokens` is the expanded length, estimated where the router does
    not expand the prompt itself. `routing_key` is the client's own, or empty.
    `blocks` is None where nobody scores prefixes. `prefix_credit` is the
    request's own, or None for the policy's. `told` is whether its first output
    will tell when its prompt was done.
    """

    prompt_tokens: int
    routing_key: str = ""
    blocks: Blocks | None = None
    prefix_credit: float | None = None
    told: bool = True


class Candidate(Protocol):
    """What a policy may know of a worker."""

    @property
    def address(self) -> str: ...

    @property
    def generation(self) -> int:
        """Differs between workers that follow each other at an address."""

    @property
    def expected_wait(self) -> float:
        """Seconds until a new request would start, as well as it can be told."""


@dataclass(frozen=True)
class Opinion:
    """What a policy thinks of a candidate, for people.

    `cost` is in seconds, the lowest wins; None where nothing is weighed.
    `matched_blocks` of the prompt are believed to be there; None where nobody
    looked.
    """

    cost: float | None = None
    matched_blocks: int | None = None


class Policy(ABC):
    """A way to choose; it may keep state, and is called from one thread.

    Choosing changes nothing, so that `explain` can ask too; what follows from
    a choice is told to `reserved`, in the same uninterrupted step.
    """

    name: str

    @abstractmethod
    def choose(self, view: RoutingView, candidates: Sequence[Candidate]) -> int:
        """The position of the chosen one in `candidates`, which are never empty."""

    def opinions(self, view: RoutingView, candidates: Sequence[Candidate]) -> list[Opinion]:
        """What the choice would go by, for each candidate."""
        return [Opinion() for _ in candidates]

    def charge(self, view: RoutingView, candidate: Candidate) -> int:
        """Prompt tokens that the request is expected to cost the candidate, at least 1."""
        return max(1, view.prompt_tokens)

    def reserved(self, view: RoutingView, candidate: Candidate) -> None:  # noqa: B027
        """The request was given to `candidate`."""
