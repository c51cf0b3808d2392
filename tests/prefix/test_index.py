"""The index against a plain model of it, and its bounds."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from router.prefix import approximate, blocks, holdings, match
from router.prefix.blocks import PromptBlocks, root_key, run_keys
from router.prefix.changes import Cleared, Removed, Stored, Tier
from router.prefix.index import IndexSettings, PrefixIndex
from router.prefix.warm import compile_ahead

SIZE = 4


def index(**bounds: float) -> PrefixIndex:
    chosen = {"blocks": 64, "holdings_per_block": 4, "expected_blocks": 64, **bounds}
    return PrefixIndex(IndexSettings(**chosen), clock=lambda: 0.0, seed=1)  # type: ignore[arg-type]


def prompt(n: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + n * SIZE, dtype=np.uint32)


def keys(ids: np.ndarray) -> np.ndarray:
    return PromptBlocks(ids, seed=1).keys(SIZE)


def hashes(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def stored(
    ids: np.ndarray, *, first: int = 100, parent: int | None = None, tier: Tier = Tier.DEVICE
) -> Stored:
    n = len(ids) // SIZE
    return Stored(hashes(*range(first, first + n)), parent, ids, SIZE, tier=tier)


def test_a_prompt_matches_where_it_was_stored() -> None:
    it = index()
    a, b = it.join(), it.join()
    it.apply(a, stored(prompt(3)))
    it.apply(b, stored(prompt(1), first=7))
    match = it.match(keys(prompt(5)), [a, b])
    assert (match.blocks[a], match.blocks[b]) == (3, 1)


def test_a_run_under_a_parent_continues_the_prompt() -> None:
    it = index()
    a = it.join()
    it.apply(a, stored(prompt(4)[: 2 * SIZE]))
    it.apply(a, stored(prompt(4)[2 * SIZE :], first=-9, parent=101))
    assert it.match(keys(prompt(4)), [a]).blocks[a] == 4


def test_a_run_under_an_unknown_parent_is_counted_and_left_out() -> None:
    it = index()
    a = it.join()
    it.apply(a, stored(prompt(2), parent=55))
    assert (it.blocks, it.orphans) == (0, 2)


def test_engine_hashes_of_different_workers_do_not_mix() -> None:
    it = index()
    a, b = it.join(), it.join()
    it.apply(a, stored(prompt(2)))
    it.apply(b, stored(prompt(2, 500)))
    it.apply(a, Removed(hashes(100, 101)))
    assert it.match(keys(prompt(2, 500)), [a, b]).blocks[:2].tolist() == [0, 2]


def test_adapters_and_salts_do_not_share() -> None:
    it = index()
    a = it.join()
    it.apply(a, Stored(hashes(1), None, prompt(1), SIZE, lora="sql", salt="tenant"))
    same = PromptBlocks(prompt(1), lora="sql", salt="tenant", seed=1).keys(SIZE)
    assert it.match(same, [a]).blocks[a] == 1
    assert it.match(keys(prompt(1)), [a]).blocks[a] == 0


def test_blocks_below_the_device_weigh_less() -> None:
    it = index()
    a = it.join()
    it.apply(a, stored(prompt(4)[:SIZE]))
    it.apply(a, stored(prompt(4)[SIZE : 3 * SIZE], first=1, parent=100, tier=Tier.HOST))
    it.apply(a, stored(prompt(4)[3 * SIZE :], first=3, parent=2, tier=Tier.DISK))
    match = it.match(keys(prompt(4)), [a])
    assert match.blocks[a] == 4
    assert match.weights[a] == pytest.approx(1 + 2 * 0.75 + 0.25)


def test_the_best_tier_counts() -> None:
    it = index()
    a = it.join()
    it.apply(a, stored(prompt(1), tier=Tier.DISK))
    it.apply(a, stored(prompt(1)))
    assert it.match(keys(prompt(1)), [a]).weights[a] == 1
    it.apply(a, Removed(hashes(100), Tier.DEVICE))
    assert it.match(keys(prompt(1)), [a]).weights[a] == pytest.approx(0.25)


def test_a_block_stays_until_its_last_copy_goes() -> None:
    it = index()
    a = it.join()
    it.apply(a, stored(prompt(1)))
    it.apply(a, stored(prompt(1)))
    it.apply(a, Removed(hashes(100)))
    assert it.match(keys(prompt(1)), [a]).blocks[a] == 1
    it.apply(a, Removed(hashes(100)))
    assert (it.match(keys(prompt(1)), [a]).blocks[a], it.blocks, it.held) == (0, 0, 0)


def test_two_hashes_of_one_content_are_two_copies() -> None:
    it = index()
    a = it.join()
    it.apply(a, stored(prompt(1), first=1))
    it.apply(a, stored(prompt(1), first=2))
    it.apply(a, Removed(hashes(1)))
    assert it.match(keys(prompt(1)), [a]).blocks[a] == 1


def test_removing_what_is_not_there_changes_nothing() -> None:
    it = index()
    a = it.join()
    it.apply(a, stored(prompt(1)))
    it.apply(a, Removed(hashes(42)))
    it.apply(a, Removed(hashes(100), Tier.HOST))
    assert it.match(keys(prompt(1)), [a]).weights[a] == 1


def test_a_hash_used_again_for_other_content_moves() -> None:
    it = index()
    a = it.join()
    it.apply(a, stored(prompt(1)))
    it.apply(a, stored(prompt(1, 500)))
    assert it.match(keys(prompt(1)), [a]).blocks[a] == 0
    assert it.match(keys(prompt(1, 500)), [a]).blocks[a] == 1


def test_clearing_one_worker_leaves_the_others() -> None:
    it = index()
    a, b = it.join(), it.join()
    it.apply(a, stored(prompt(2)))
    it.apply(b, stored(prompt(2)))
    it.apply(a, Cleared())
    assert it.match(keys(prompt(2)), [a, b]).blocks[:2].tolist() == [0, 2]
    assert it.held == 2


def test_a_new_holder_under_an_old_number_starts_empty() -> None:
    it = index()
    a = it.join()
    it.apply(a, stored(prompt(2)))
    it.expect(a, keys(prompt(3)), 60)
    it.leave(a)
    assert it.join() == a
    assert it.match(keys(prompt(3)), [a]).blocks[a] == 0
    assert it.blocks == 0


def test_only_the_asked_are_answered_for() -> None:
    it = index()
    a, b = it.join(), it.join()
    it.apply(a, stored(prompt(1)))
    it.apply(b, stored(prompt(1)))
    assert it.match(keys(prompt(1)), [b]).blocks[:2].tolist() == [0, 1]


def test_more_than_64_holders() -> None:
    it = index()
    everyone = [it.join() for _ in range(150)]
    for holder in everyone[::3]:
        it.apply(holder, stored(prompt(1)))
    blocks = it.match(keys(prompt(1)), everyone).blocks
    assert np.flatnonzero(blocks).tolist() == everyone[::3]


def test_the_least_recently_used_branch_goes_first() -> None:
    it = index(blocks=8)
    a = it.join()
    it.apply(a, stored(prompt(4), first=0))
    it.apply(a, stored(prompt(4, 1000), first=10))
    it.use(keys(prompt(4)))
    it.apply(a, stored(prompt(4, 2000), first=20))
    lengths = [it.match(keys(prompt(4, s)), [a]).blocks[a] for s in (0, 1000, 2000)]
    assert lengths == [4, 0, 4]
    assert (it.blocks, it.held, it.evicted) == (8, 8, 4)


def test_a_question_alone_does_not_count_as_use() -> None:
    it = index(blocks=8)
    a = it.join()
    it.apply(a, stored(prompt(4), first=0))
    it.apply(a, stored(prompt(4, 1000), first=10))
    it.match(keys(prompt(4)), [a])
    it.apply(a, stored(prompt(1, 2000), first=20))
    assert it.match(keys(prompt(4)), [a]).blocks[a] < 4


def test_the_cap_holds_against_endless_prompts() -> None:
    it = index(blocks=256, holdings_per_block=1)
    a = it.join()
    for i in range(2000):
        it.apply(a, stored(prompt(7, i * 100), first=i * 10))
        assert it.blocks <= 256
        assert it.held <= 256
    assert it.match(keys(prompt(7, 1999 * 100)), [a]).blocks[a] == 7


def test_holdings_are_bounded_too() -> None:
    it = index(blocks=64, holdings_per_block=1)
    everyone = [it.join() for _ in range(10)]
    for holder in everyone:
        it.apply(holder, stored(prompt(10)))
    assert it.held <= 64


def test_agrees_with_a_plain_model() -> None:
    rng = random.Random(5)
    it = index(blocks=4096)
    holders = [it.join() for _ in range(5)]
    tree = [run_keys(prompt(6, s), SIZE, root_key(SIZE, seed=1)) for s in range(0, 4000, 400)]
    held: dict[int, Counter[tuple[int, Tier]]] = {h: Counter() for h in holders}
    for step in range(6000):
        holder, line = rng.choice(holders), rng.choice(tree)
        at = rng.randrange(6)
        key, tier = int(line[at]), rng.choice(list(Tier))
        # The engine's name of a block: anything that is its own.
        name = np.array([key % (2**61) + holder], np.int64)
        match rng.random():
            case p if p < 0.5:
                parent = int(line[at - 1]) if at else 0
                it.store_keys(holder, name, line[at : at + 1], parent, tier)
                held[holder][key, tier] += 1
            case p if p < 0.995:
                it.apply(holder, Removed(name, tier))
                if held[holder][key, tier]:
                    held[holder][key, tier] -= 1
            case _:
                it.apply(holder, Cleared())
                held[holder].clear()
        if step % 20 == 0:
            found = it.match(line, holders)
            for h in holders:
                weights = []
                for k in line:
                    tiers = [t for t in Tier if held[h][int(k), t]]
                    if not tiers:
                        break
                    weights.append({0: 1.0, 1: 0.75, 2: 0.25}[min(tiers)])
                assert found.blocks[h] == len(weights)
                assert found.weights[h] == pytest.approx(sum(weights))
    alive = {k for counts in held.values() for (k, _), n in counts.items() if n}
    assert it.blocks == len(alive)


def test_under_pressure_it_never_claims_what_is_not_held() -> None:
    rng = random.Random(9)
    it = index(blocks=48, holdings_per_block=1.5)
    holders = [it.join() for _ in range(4)]
    tree = [run_keys(prompt(6, s), SIZE, root_key(SIZE, seed=1)) for s in range(0, 8000, 400)]
    held: dict[int, Counter[int]] = {h: Counter() for h in holders}
    for _ in range(8000):
        holder, line = rng.choice(holders), rng.choice(tree)
        depth = rng.randrange(1, 7)
        if rng.random() < 0.6:
            it.store_keys(holder, line[:depth].view(np.int64), line[:depth])
            held[holder].update(line[:depth].tolist())
        else:
            it.apply(holder, Removed(line[depth - 1 :].view(np.int64)))
            held[holder].subtract({k: 1 for k in line[depth - 1 :].tolist() if held[holder][k]})
        if rng.random() < 0.3:
            it.use(line)
        found = it.match(line, holders).blocks
        for h in holders:
            assert all(held[h][int(k)] > 0 for k in line[: found[h]])
        assert it.blocks <= 48
        assert it.held <= 72
    for h in holders:
        it.leave(h)
    assert (it.blocks, it.held) == (0, 0)


@pytest.mark.slow
def test_memory_stays_flat_under_endless_prompts() -> None:
    it = PrefixIndex(IndexSettings(blocks=100_000, expected_blocks=100_000), seed=1)
    holders = [it.join() for _ in range(8)]
    rng = np.random.default_rng(1)
    sizes = []
    for i in range(40_000):
        line = rng.integers(1, 2**63, 125).astype(np.uint64)
        it.store_keys(holders[i % 8], line.view(np.int64), line)
        it.expect(holders[i % 8], line, 120)
        assert it.blocks <= 100_000
        assert it.expected <= 100_000
        if i in (20_000, 39_999):
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert sizes[1] - sizes[0] < 8 << 20


def test_nothing_is_left_to_compile_once_warm() -> None:
    compile_ahead()
    loops = (
        blocks._prompt_pass,
        blocks._run_pass,
        holdings.store,
        holdings.take,
        holdings.leave,
        holdings.key_of,
        match.walk,
        match.touch_chain,
        approximate._expect,
        approximate._forget,
    )
    before = [len(loop.signatures) for loop in loops]
    test_agrees_with_a_plain_model()
    it = index()
    a = it.join()
    it.apply(a, stored(prompt(2)))
    it.apply(a, stored(prompt(3)[2 * SIZE :], first=-(2**63), parent=101))
    it.expect(a, keys(prompt(3)), 5)
    assert it.match(keys(prompt(3)), [a]).blocks[a] == 3
    it.leave(a)
    assert [len(loop.signatures) for loop in loops] == before
