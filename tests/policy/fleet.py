"""Workers as policies see them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from router.fleet.pressure import Pressure
from router.policy.base import RoutingView
from router.prefix.blocks import Keys, PromptBlocks
from router.prefix.index import IndexSettings, PrefixIndex
from router.prefix.resident import Resident

SIZE = 16


@dataclass(eq=False)
class FakeWorker:
    address: str
    expected_wait: float = 0.0
    generation: int = 1
    pressure: Pressure = field(default_factory=Pressure)
    resident: Resident | None = None


def fleet(n: int) -> list[FakeWorker]:
    """n idle workers with one index between them."""
    index = PrefixIndex(IndexSettings(blocks=1024, expected_blocks=1024), clock=lambda: 0.0)
    return [
        FakeWorker(f"10.0.0.{i}:50051", resident=Resident(index, block_size=SIZE)) for i in range(n)
    ]


def prompt(blocks: int, start: int = 0) -> RoutingView:
    """A prompt of whole blocks and one token more."""
    ids = np.arange(start, start + SIZE * blocks + 1, dtype=np.uint32)
    return RoutingView(len(ids), blocks=PromptBlocks(ids))


class Counted:
    """Blocks that tell how often their keys were asked for."""

    exact = True

    def __init__(self, view: RoutingView) -> None:
        assert view.blocks is not None
        self._blocks = view.blocks
        self.asked = 0

    def keys(self, block_size: int) -> Keys:
        self.asked += 1
        return self._blocks.keys(block_size)
