"""Under a simulated load the prefix policy does what it is for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = str(Path(__file__).parents[2] / "scripts/bench")


@pytest.fixture(scope="module")
def sim() -> Any:
    sys.path.insert(0, BENCH)
    try:
        import routing_sim

        yield routing_sim
    finally:
        sys.path.remove(BENCH)


def test_images_that_come_again_are_found_and_nobody_queues_for_them(sim: Any) -> None:
    trace = sim.multimodal(3, rate=12.0, seconds=40)
    results = {
        name: sim.simulate(trace, sim.POLICIES[name], 8, 3, sim.Engine())
        for name in ("least load", "published cost", "prefix (ours)")
    }
    ours = results.pop("prefix (ours)")
    assert ours.hits > 0.4
    for other in results.values():
        assert ours.mean < other.mean
        assert ours.p99 < other.p99


def test_a_hanging_worker_is_left_alone(sim: Any) -> None:
    trace = sim.multimodal(4, rate=12.0, seconds=40)
    veto, none = (
        sim.simulate(trace, sim._prefix(sim.Prefix, silence_veto=s), 8, 4, sim.Engine(), stall=15)
        for s in (2.0, 1e9)
    )
    assert veto.mean < none.mean


def test_a_published_trace_is_read(sim: Any, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 2000, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 3]},
        {"timestamp": 500, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
    ]
    file = tmp_path / "conversation_trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    trace = sim.mooncake(file)
    first, second = trace.requests
    assert (first.at, second.at, trace.block_size) == (0.5, 2.0, 512)
    # The last id is of a block that is not full.
    assert first.blocks.tolist() == second.blocks.tolist()
    assert trace.describe()["ideal_hits"] == 0.5
