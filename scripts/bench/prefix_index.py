"""Measures the prefix index against a dict of sets, on one core.

    python scripts/bench/prefix_index.py [--workers 64] [--prompt 8192] [--block 16]

Prints lookup, key and event times and the memory of a full index, for the
index and for the plain form of the same thing in the same run. Times are of
the thread's own CPU, so that a busy machine does not blur them.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from router.fleet.pressure import Backlog
from router.policy.base import RoutingView
from router.policy.prefix import Prefix
from router.policy.settings import PolicySettings
from router.prefix.blocks import MediaSpan, PromptBlocks, root_key, run_keys
from router.prefix.changes import Removed, Stored
from router.prefix.events import EventReader
from router.prefix.index import IndexSettings, PrefixIndex
from router.prefix.resident import Resident
from router.wire.common_pb2 import (
    KvBlock,
    KvBlocksRemoved,
    KvBlocksStored,
    KvCacheEvent,
    KvEventBatch,
)


class PlainIndex:
    """The same knowledge in dictionaries: key -> holders, and (holder, hash) -> key."""

    def __init__(self) -> None:
        self.holders: defaultdict[int, set[int]] = defaultdict(set)
        self.keys: dict[tuple[int, int], int] = {}

    def store(self, holder: int, hashes: list[int], keys: list[int]) -> None:
        for name, key in zip(hashes, keys, strict=True):
            self.keys[holder, name] = key
            self.holders[key].add(holder)

    def remove(self, holder: int, hashes: list[int]) -> None:
        for name in hashes:
            key = self.keys.pop((holder, name), None)
            if key is not None:
                self.holders[key].discard(holder)
                if not self.holders[key]:
                    del self.holders[key]

    def match(self, keys: list[int], holders: range) -> dict[int, int]:
        active, lengths = set(holders), dict.fromkeys(holders, 0)
        for depth, key in enumerate(keys):
            have = self.holders.get(key, set())
            for holder in active - have:
                lengths[holder] = depth
            active &= have
            if not active:
                return lengths
        for holder in active:
            lengths[holder] = len(keys)
        return lengths


def median_us(work: Callable[[int], object], rounds: int) -> tuple[float, float]:
    """Median and 99th percentile of `work(i)` in microseconds."""
    times = []
    for i in range(rounds):
        start = time.thread_time()
        work(i)
        times.append((time.thread_time() - start) * 1e6)
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def resident_mib() -> float:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def show(name: str, value: str, plain: str = "") -> None:
    print(f"{name:<46} {value:>22} {plain:>22}")


def lookups(workers: int, length: int, size: int) -> None:
    """Keys and one walk over prompts that all workers hold to different depths."""
    rng = np.random.default_rng(1)
    n = length // size
    index, plain = PrefixIndex(IndexSettings(blocks=1 << 20)), PlainIndex()
    holders = [index.join() for _ in range(workers)]
    prompts = [rng.integers(0, 150_000, length).astype(np.uint32) for _ in range(64)]
    chains = [run_keys(p, size, root_key(size)) for p in prompts]
    depths = random.Random(2)
    for chain in chains:
        for holder in holders:
            if depths.random() < 0.3:
                depth = depths.randrange(1, n + 1)
                names = chain[:depth].view(np.int64)
                index.store_keys(holder, names, chain[:depth])
                plain.store(holder, names.tolist(), chain[:depth].tolist())
    lists = [c.tolist() for c in chains]
    for chain, keys in zip(chains, lists, strict=True):
        found, wanted = index.match(chain, holders).blocks, plain.match(keys, range(workers))
        assert all(found[h] == wanted[h] for h in holders), "the two indexes disagree"

    pictures = [MediaSpan("0" * 64, 100 + i * length // 5, length // 8) for i in range(4)]
    text, _ = median_us(lambda i: PromptBlocks(prompts[i % 64]).keys(size), 500)
    media, _ = median_us(lambda i: PromptBlocks(prompts[i % 64], pictures).keys(size), 500)
    show("keys of a text prompt, median us", f"{text:.0f}")
    show("keys with four images, median us", f"{media:.0f}")
    one, p99 = median_us(lambda i: index.match(chains[i % 64], holders), 2000)
    slow, slow99 = median_us(lambda i: plain.match(lists[i % 64], range(workers)), 500)
    show("lookup, median us", f"{one:.0f}", f"{slow:.0f}")
    show("lookup, p99 us", f"{p99:.0f}", f"{slow99:.0f}")
    use, _ = median_us(lambda i: index.use(chains[i % 64]), 1000)
    show("marking as used, median us", f"{use:.0f}")


def events(workers: int, size: int, blocks: int) -> None:
    """Runs of 8 blocks stored and the oldest removed, from token ids on."""
    rng = np.random.default_rng(3)
    index, plain = PrefixIndex(IndexSettings(blocks=1 << 20)), PlainIndex()
    holders = [index.join() for _ in range(workers)]
    runs = [
        Stored(
            np.arange(i * 8, i * 8 + 8, dtype=np.int64),
            None,
            rng.integers(0, 150_000, 8 * size).astype(np.uint32),
            size,
        )
        for i in range(blocks // 8)
    ]
    index.apply(holders[0], runs[0])
    index.apply(holders[0], Removed(runs[0].hashes))
    start = time.thread_time()
    for i, run in enumerate(runs):
        index.apply(holders[i % workers], run)
        if i >= 1000:
            index.apply(holders[(i - 1000) % workers], Removed(runs[i - 1000].hashes))
    rate = 2 * blocks / (time.thread_time() - start)
    names = [run.hashes.tolist() for run in runs]
    start = time.thread_time()
    for i, run in enumerate(runs):
        keys = run_keys(run.tokens, size, root_key(size))
        plain.store(i % workers, names[i], keys.tolist())
        if i >= 1000:
            plain.remove((i - 1000) % workers, names[i - 1000])
    slow = 2 * blocks / (time.thread_time() - start)
    show("block events a second", f"{rate:,.0f}", f"{slow:,.0f}")


def messages(size: int, blocks: int) -> None:
    """The same from the messages of a stream: parsing, reading and applying."""
    rng = np.random.default_rng(6)
    encoded = [
        KvEventBatch(
            sequence_number=i + 1,
            events=[
                KvCacheEvent(
                    stored=KvBlocksStored(
                        blocks=[
                            KvBlock(
                                block_hash=8 * i + j,
                                token_ids=rng.integers(0, 150_000, size).tolist(),
                                block_size=size,
                            )
                            for j in range(8)
                        ]
                    )
                ),
                KvCacheEvent(
                    removed=KvBlocksRemoved(block_hashes=range(8 * i - 8000, 8 * i - 7992))
                ),
            ],
        ).SerializeToString()
        for i in range(blocks // 8)
    ]
    reader, resident = EventReader(), Resident(PrefixIndex(), size)
    start = time.thread_time()
    for one in encoded:
        batch = KvEventBatch.FromString(one)
        for action in reader.apply(batch):
            if isinstance(action, Stored | Removed):
                resident.apply(batch.dp_rank, action)
    rate = 16 * len(encoded) / (time.thread_time() - start)
    show("block events a second, from the stream's bytes", f"{rate:,.0f}")


def choosing(workers: int, length: int, size: int) -> None:
    """The whole choice of the prefix policy, keys included."""
    rng = np.random.default_rng(7)
    index = PrefixIndex()
    places = {f"w{i}": (Resident(index, size), Backlog(time.monotonic)) for i in range(workers)}
    fleet = [SimpleNamespace(address=name, generation=1, expected_wait=0.0) for name in places]
    policy = Prefix(
        PolicySettings(policy="prefix"),
        lambda worker: places[worker.address][0],
        lambda worker: places[worker.address][1].pressure(),
        random.Random(8),
    )
    prompts = [rng.integers(0, 150_000, length).astype(np.uint32) for _ in range(32)]
    for i, prompt in enumerate(prompts):
        for worker in fleet[i % 4 :: 4]:
            policy.reserved(RoutingView(length, blocks=PromptBlocks(prompt)), worker)

    def choose(i: int) -> None:
        view = RoutingView(length, blocks=PromptBlocks(prompts[i % 32]))
        chosen = fleet[policy.choose(view, fleet)]
        policy.charge(view, chosen)
        policy.reserved(view, chosen)

    choice, p99 = median_us(choose, 1000)
    show("choosing and reserving, keys included, median us", f"{choice:.0f}")
    show("choosing and reserving, keys included, p99 us", f"{p99:.0f}")


def memory(workers: int, blocks: int) -> None:
    """A full index: every block held by one worker, every tenth by two."""
    keys = np.random.default_rng(4).integers(1, 2**63, blocks).astype(np.uint64)
    parts = [keys[i : i + 500] for i in range(0, blocks, 500)]
    gc.collect()
    before = resident_mib()
    index = PrefixIndex(IndexSettings(blocks=blocks))
    holders = [index.join() for _ in range(workers)]
    for i, part in enumerate(parts):
        index.store_keys(holders[i % workers], part.view(np.int64), part)
        if i % 10 == 0:
            index.store_keys(holders[(i + 1) % workers], part.view(np.int64), part)
    ours = resident_mib() - before
    assert index.blocks == blocks
    fresh = np.random.default_rng(5).integers(1, 2**63, (400, 500)).astype(np.uint64)
    start = time.thread_time()
    for i, part in enumerate(fresh):
        index.store_keys(holders[i % workers], part.view(np.int64), part)
    full = (time.thread_time() - start) / fresh.size * 1e6
    assert index.blocks == blocks
    del index
    gc.collect()
    before = resident_mib()
    plain = PlainIndex()
    for i, part in enumerate(parts):
        plain.store(i % workers, part.view(np.int64).tolist(), part.tolist())
        if i % 10 == 0:
            plain.store((i + 1) % workers, part.view(np.int64).tolist(), part.tolist())
    show(f"memory of {blocks:,} blocks, MiB", f"{ours:.0f}", f"{resident_mib() - before:.0f}")
    show("store when full (evicts one), us a block", f"{full:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens")
    parser.add_argument("--block", type=int, default=16, help="tokens")
    parser.add_argument("--events", type=int, default=200_000, help="blocks stored")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of the full index")
    given = parser.parse_args()
    print(f"{given.workers} workers, prompts of {given.prompt} tokens, blocks of {given.block}")
    show("", "index", "dict of sets")
    # First, while no other index has left memory behind.
    memory(given.workers, given.blocks)
    lookups(given.workers, given.prompt, given.block)
    events(given.workers, given.block, given.events)
    messages(given.block, given.events // 4)
    choosing(given.workers, given.prompt, given.block)


if __name__ == "__main__":
    main()
