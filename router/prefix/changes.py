"""What a worker's cache can report: blocks stored, removed, all cleared."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from router.prefix.blocks import BlockExtras, Tokens


class Tier(IntEnum):
    """Where a block lies; the value is its row in the index."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True)
class Stored:
    """A run of full blocks, each the parent of the next.

    `hashes` are the engine's own (int64 [n]), `parent` that of the block
    before the run or None at the start of a prompt; `tokens` is uint32
    [n * block_size].
    """

    hashes: npt.NDArray[np.int64]
    parent: int | None
    tokens: Tokens
    block_size: int
    extras: BlockExtras | None = None
    lora: str = ""
    salt: str = ""
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True)
class Removed:
    """One copy of each block is gone; the tier is None where the worker did not say."""

    hashes: npt.NDArray[np.int64]
    tier: Tier | None = None


@dataclass(frozen=True)
class Cleared:
    """The worker holds nothing any more."""


@dataclass(frozen=True)
class Lost:
    """Reports were missed: what was reported before says nothing any more."""


Change = Stored | Removed | Cleared | Lost
