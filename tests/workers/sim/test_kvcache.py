"""The block bookkeeping, without a worker around it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sim.kvcache import Holding, KvCache, Placed, Removed, Stored


def ids(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


def run(cache: KvCache, text: str) -> tuple[int, list[Stored | Removed]]:
    """A request that comes and goes; what matched, in blocks, and what changed."""
    chained = cache.chain(ids(text))
    holding, removed = cache.hold(chained, len(text), len(text))
    matched = holding.cached_blocks
    stored = cache.store(holding, chained[matched:])
    cache.release(holding)
    return matched, [*removed, *stored]


def test_a_prefix_is_found_again_up_to_its_first_difference() -> None:
    cache = KvCache(100, 4)
    assert run(cache, "aaaabbbbcccc--")[0] == 0
    assert run(cache, "aaaabbbbdddd--")[0] == 2
    assert run(cache, "xaaabbbb--")[0] == 0


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    cache = KvCache(100, 4)
    run(cache, "aaaabbbb")
    assert run(cache, "aaaabbbb")[0] == 1


def test_the_same_tokens_under_another_parent_are_another_block() -> None:
    cache = KvCache(100, 4)
    first, second = cache.chain(ids("aaaaaaaa"))
    assert first.block_hash != second.block_hash
    assert second.parent == first.block_hash


def test_media_change_the_blocks_they_overlap_and_those_behind_alone() -> None:
    cache = KvCache(100, 4)
    text = ids("a" * 16)
    plain = cache.chain(text)
    with_media = cache.chain(text, [Placed("h", 6, 3)])
    other = cache.chain(text, [Placed("g", 6, 3)])
    moved = cache.chain(text, [Placed("h", 5, 3)])
    assert plain[0] == with_media[0] == other[0] == moved[0]
    for at in (1, 2, 3):
        hashes = {chain[at].block_hash for chain in (plain, with_media, other, moved)}
        assert len(hashes) == 4
    assert [len(block.extra) for block in with_media] == [0, 1, 1, 0]
    assert [block.extra[0].offset for block in with_media[1:3]] == [2, -2]


def test_workers_have_hashes_of_their_own() -> None:
    text = ids("aaaa")
    assert KvCache(1, 4, salt=1).chain(text) != KvCache(1, 4, salt=2).chain(text)


def test_blocks_that_are_held_are_never_given_up() -> None:
    cache = KvCache(4, 4)
    chained = cache.chain(ids("aaaabbbb-"))
    holding, _ = cache.hold(chained, 9, 9)
    cache.store(holding, chained)
    assert not cache.fits(cache.chain(ids("cccc-")), 5, 5)
    assert not cache.clear()
    cache.release(holding)
    assert cache.fits(cache.chain(ids("cccc-")), 5, 5)
    assert cache.clear()


def test_without_sharing_nothing_is_found_again() -> None:
    cache = KvCache(100, 4, sharing=False)
    run(cache, "aaaabbbb-")
    assert run(cache, "aaaabbbb-") == (0, [])


TEXTS = st.text(alphabet="ab", min_size=1, max_size=20)


@settings(max_examples=200)
@given(st.lists(st.tuples(TEXTS, st.booleans()), max_size=30))
def test_whatever_comes_and_goes_the_books_balance(steps: list[tuple[str, bool]]) -> None:
    cache = KvCache(8, 2)
    held: list[Holding] = []
    known: set[int] = set()
    for text, release_first in steps:
        if release_first and held:
            cache.release(held.pop(0))
        chained = cache.chain(ids(text))
        if not cache.fits(chained, len(text), len(text)):
            continue
        holding, removed = cache.hold(chained, len(text), len(text))
        for change in removed:
            # Only what was told of can be removed, and only once.
            assert known.issuperset(change.block_hashes)
            known.difference_update(change.block_hashes)
        for block in cache.store(holding, chained[holding.cached_blocks :]):
            assert block.block_hash not in known
            known.add(block.block_hash)
        held.append(holding)
        assert cache.held <= cache.used <= max(cache.capacity, cache.held)
        assert cache.used == len(known) + sum(one.private for one in held)
    for holding in held:
        cache.release(holding)
    assert cache.held == 0
    assert cache.used == len(known)
    assert cache.clear()
    assert cache.used == 0
