"""Block keys: equal exactly when the engine's KV would be equal."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from router.prefix.blocks import (
    PROCESS_SEED,
    BlockExtras,
    MediaSpan,
    PromptBlocks,
    identifier_digest,
    prompt_keys,
    root_key,
    run_keys,
    xxh64_words,
)

ROOT = root_key(16, seed=7)


def tokens(n: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + n, dtype=np.uint32)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 2**64 - 1))
def test_the_compiled_hash_is_xxh64(words: list[int], seed: int) -> None:
    array = np.array(words, np.uint32)
    want = xxhash.xxh64_intdigest(array.astype("<u4").tobytes(), seed)
    assert int(xxh64_words(array, 0, len(array), np.uint64(seed))) == want


def test_keys_are_as_documented() -> None:
    ids = tokens(40)
    media = [MediaSpan("cat", 10, 10)]
    digest = xxhash.xxh64_intdigest(b"cat", PROCESS_SEED)
    first = xxhash.xxh64_intdigest(ids[:16].tobytes() + struct.pack("<Qq", digest, 10), ROOT)
    second = xxhash.xxh64_intdigest(ids[16:32].tobytes() + struct.pack("<Qq", digest, -6), first)
    assert prompt_keys(ids, 16, ROOT, media).tolist() == [first, second]


def test_only_full_blocks_have_keys() -> None:
    assert len(prompt_keys(tokens(15), 16, ROOT)) == 0
    assert len(prompt_keys(tokens(31), 16, ROOT)) == 1


def test_a_change_shows_in_its_block_and_all_after_it() -> None:
    other = tokens(64)
    other[20] += 1
    same = prompt_keys(tokens(64), 16, ROOT) == prompt_keys(other, 16, ROOT)
    assert same.tolist() == [True, False, False, False]


def test_adapter_salt_and_block_size_change_every_key() -> None:
    roots = {
        root_key(16, seed=1),
        root_key(32, seed=1),
        root_key(16, lora="a", seed=1),
        root_key(16, salt="a", seed=1),
        root_key(16, lora="a", salt="b", seed=1),
        root_key(16, lora="ab", seed=1),
        root_key(16, seed=2),
    }
    assert len(roots) == 7
    keys = {int(k) for root in roots for k in prompt_keys(tokens(32), 16, root)}
    assert len(keys) == 14


def test_blocks_before_the_first_image_are_shared_between_images() -> None:
    cat = prompt_keys(tokens(80), 16, ROOT, [MediaSpan("cat", 40, 20)])
    dog = prompt_keys(tokens(80), 16, ROOT, [MediaSpan("dog", 40, 20)])
    assert (cat == dog).tolist() == [True, True, False, False, False]


def test_the_same_image_elsewhere_in_its_block_is_another_block() -> None:
    ids = np.full(48, 5, np.uint32)
    here = prompt_keys(ids, 16, ROOT, [MediaSpan("cat", 20, 8)])
    there = prompt_keys(ids, 16, ROOT, [MediaSpan("cat", 21, 8)])
    assert (here == there).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("offset", "length", "touched"),
    [(16, 16, 1), (15, 1, 0), (16, 1, 1), (31, 1, 1), (32, 16, 2)],
)
def test_an_image_counts_where_it_overlaps(offset: int, length: int, touched: int) -> None:
    plain = prompt_keys(tokens(48), 16, ROOT)
    keys = prompt_keys(tokens(48), 16, ROOT, [MediaSpan("cat", offset, length)])
    assert np.flatnonzero(plain != keys)[0] == touched


def test_whoever_makes_up_identifiers_does_not_know_their_digests() -> None:
    assert identifier_digest("a") == identifier_digest(b"a") != identifier_digest("b")
    assert identifier_digest("a") != xxhash.xxh64_intdigest(b"a")


@given(
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=5),
    st.integers(0, 60),
)
def test_events_that_describe_a_prompt_give_the_prompts_keys(
    size: int, gaps_and_lengths: list[tuple[int, int]], count: int
) -> None:
    media, at = [], 0
    for i, (gap, length) in enumerate(gaps_and_lengths):
        media.append(MediaSpan(f"item{i}", at + gap, length))
        at += gap + length
    ids = tokens(count)
    blocks = count // size
    starts, digests, offsets = [0], [], []
    for block in range(blocks):
        for item in media:
            if item.offset < (block + 1) * size and item.offset + item.length > block * size:
                digests.append(identifier_digest(item.identifier))
                offsets.append(item.offset - block * size)
        starts.append(len(digests))
    extras = BlockExtras(
        np.array(starts, np.int64),
        np.array(digests, np.uint64),
        np.array(offsets, np.int64),
        ("",) * len(digests),
    )
    described = run_keys(ids[: blocks * size], size, ROOT, extras)
    assert described.tolist() == prompt_keys(ids, size, ROOT, media).tolist()


def test_read_only_ids_are_taken_as_they_are() -> None:
    frozen = np.frombuffer(tokens(32).tobytes(), np.uint32)
    assert prompt_keys(frozen, 16, ROOT).tolist() == prompt_keys(tokens(32), 16, ROOT).tolist()


def test_a_run_continues_under_its_parent() -> None:
    whole = run_keys(tokens(64), 16, ROOT)
    tail = run_keys(tokens(32, 32), 16, int(whole[1]))
    assert tail.tolist() == whole[2:].tolist()


def test_keys_are_computed_once_for_each_block_size() -> None:
    prompt = PromptBlocks(tokens(64), seed=3)
    assert prompt.keys(16) is prompt.keys(16)
    assert len(prompt.keys(32)) == 2
    assert prompt.keys(16)[0] != prompt.keys(32)[0]
