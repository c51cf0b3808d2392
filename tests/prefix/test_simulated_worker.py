"""The index follows the simulator's cache, whose hashes are its own."""

from __future__ import annotations

import random

import numpy as np
import pytest

from router.prefix.blocks import MediaSpan, PromptBlocks
from router.prefix.changes import Change
from router.prefix.events import EventReader, Loaded, Resync
from router.prefix.index import IndexSettings, PrefixIndex
from router.prefix.resident import Resident
from router.wire import common
from workers.sim.events import EventHub
from workers.sim.kvcache import KvCache, Placed, Removed


@pytest.mark.parametrize("size", [4, 16])
async def test_every_block_of_the_worker_is_found_by_its_content(size: int) -> None:
    rng = random.Random(size)
    index = PrefixIndex(IndexSettings(blocks=4096, expected_blocks=64))
    hubs = [EventHub(common.EngineLoad) for _ in range(2)]
    caches = [KvCache(1000, size, salt=salt) for salt in (1, 2)]
    residents = [Resident(index, block_size=1) for _ in hubs]
    readers = [EventReader() for _ in hubs]
    streams = [hub.subscribe(0, load_from_start=True) for hub in hubs]
    for stream in streams:
        await anext(stream)
    picture_pad = 9
    sent = []
    for number in range(60):
        # All begin alike, as prompts with one system prompt do.
        placed, ids = [], [5] * (2 * size)
        ids += [rng.randrange(10, 14) for _ in range(rng.randrange(3 * size))]
        for _ in range(rng.randrange(3)):
            length = rng.randrange(1, 3 * size)
            placed.append(Placed(f"picture{rng.randrange(3)}", len(ids), length))
            ids += [picture_pad] * length + [rng.randrange(10, 14)] * rng.randrange(size)
        ids += [7] * rng.randrange(2 * size)
        at = number % 2
        chain = caches[at].chain(np.array(ids, np.uint32), placed)
        if not chain:
            continue
        hubs[at].publish(chain)
        for action in readers[at].apply(await anext(streams[at])):
            assert not isinstance(action, Resync)
            if not isinstance(action, Loaded):
                change: Change = action
                residents[at].apply(0, change)
        spans = [MediaSpan(p.identifier, p.offset, p.length) for p in placed]
        sent.append((at, chain, PromptBlocks(np.array(ids, np.uint32), spans)))
    assert len(sent) > 30
    for at, chain, prompt in sent:
        holder = residents[at].holders[0]
        assert index.match(prompt.keys(size), [holder]).blocks[holder] == len(chain)
    # The same content has other hashes elsewhere, and is one block here.
    keys = {int(key) for _, _, prompt in sent for key in prompt.keys(size)}
    hashes = {(at, block.block_hash) for at, chain, _ in sent for block in chain}
    assert index.blocks == len(keys)
    assert len({block_hash for _, block_hash in hashes}) == len(hashes) > len(keys)
    at, chain, prompt = sent[-1]
    for _ in range(len(sent)):
        # Each was stored once for every prompt that has it.
        hubs[at].publish([Removed((chain[0].block_hash,))])
        for action in readers[at].apply(await anext(streams[at])):
            if not isinstance(action, Loaded | Resync):
                residents[at].apply(0, action)
    holder = residents[at].holders[0]
    assert index.match(prompt.keys(size), [holder]).blocks[holder] == 0
