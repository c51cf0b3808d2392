"""The keys of a prompt's KV blocks: equal keys, equal KV.

The key of a block is XXH64 over the block's token ids (uint32, little endian)
followed by, for each media item that overlaps the block, the seeded XXH64 of its
identifier and its offset from the block's first token (uint64 and int64); the
seed is the parent's key. The first block's parent is a root that depends on
LoRA adapter, cache salt and block size. That is what vLLM hashes, so equal
content gives equal keys whichever hash function the engine uses.

Two different contents share a 64-bit key by chance once in 2^64: among a
million blocks the odds are 3e-8. It would only make a worker look warmer than
it is for one request. Roots and identifiers are seeded with a number drawn at
start, so prompts that collide on purpose cannot be prepared.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from numba import njit

Keys = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.uint32]

PROCESS_SEED = secrets.randbits(64)
# Stands for "no such block" wherever a key is expected.
NO_KEY = 0

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)


@dataclass(frozen=True)
class MediaSpan:
    """A media item in the expanded prompt: `length` placeholder tokens from `offset` on."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True)
class BlockExtras:
    """What besides tokens went into a run of blocks, in rows of one array each.

    Rows `starts[i]` to `starts[i + 1]` belong to block i of the run: `digests`
    (uint64) of the identifiers, `offsets` (int64) from the block's first token.
    `identifiers` are the names themselves, empty for what is no media item.
    """

    starts: npt.NDArray[np.int64]
    digests: Keys
    offsets: npt.NDArray[np.int64]
    identifiers: tuple[str, ...]


def root_key(block_size: int, *, lora: str = "", salt: str = "", seed: int = PROCESS_SEED) -> int:
    """The parent key of first blocks."""
    named = f"{block_size}\0{len(lora)}\0{lora}\0{salt}"
    return xxhash.xxh64_intdigest(named.encode(), seed) or 1


def identifier_digest(identifier: str | bytes) -> int:
    """A media identifier as it goes into keys."""
    return xxhash.xxh64_intdigest(
        identifier.encode() if isinstance(identifier, str) else identifier, PROCESS_SEED
    )


def prompt_keys(
    tokens: Tokens, block_size: int, root: int, media: Sequence[MediaSpan] = ()
) -> Keys:
    """Keys of the full blocks of a prompt, [len(tokens) // block_size].

    `tokens` are the expanded ids, uint32 [n]; `media` is in prompt order and
    does not overlap.
    """
    keys = np.empty(len(tokens) // block_size, np.uint64)
    digests = np.array([identifier_digest(m.identifier) for m in media], np.uint64)
    begins = np.array([m.offset for m in media], np.int64)
    ends = np.array([m.offset + m.length for m in media], np.int64)
    _prompt_pass(_ids(tokens), block_size, np.uint64(root), digests, begins, ends, keys)
    return keys


def run_keys(
    tokens: Tokens, block_size: int, parent: int, extras: BlockExtras | None = None
) -> Keys:
    """Keys of a run of full blocks under `parent`, as KV events describe them.

    `tokens` is uint32 [blocks * block_size].
    """
    tokens = _ids(tokens)
    keys = np.empty(len(tokens) // block_size, np.uint64)
    if extras is None:
        none = np.empty(0, np.int64)
        _prompt_pass(tokens, block_size, np.uint64(parent), none.view(np.uint64), none, none, keys)
    else:
        _run_pass(
            tokens,
            block_size,
            np.uint64(parent),
            extras.starts,
            extras.digests,
            extras.offsets,
            keys,
        )
    return keys


def _ids(tokens: Tokens) -> Tokens:
    # Compiled code is specialised by memory layout; one layout, one compilation.
    return np.array(tokens, np.uint32, order="C")


@dataclass(frozen=True)
class PromptBlocks:
    """A prompt whose block keys are computed when first asked for, per block size.

    `exact` says that the media's identifiers are those that workers report.
    """

    tokens: Tokens
    media: Sequence[MediaSpan] = ()
    lora: str = ""
    salt: str = ""
    seed: int = PROCESS_SEED
    exact: bool = True
    _keys: dict[int, Keys] = field(default_factory=dict, init=False, repr=False, compare=False)

    def keys(self, block_size: int) -> Keys:
        """Keys of the full blocks, uint64 [len(tokens) // block_size]."""
        keys = self._keys.get(block_size)
        if keys is None:
            root = root_key(block_size, lora=self.lora, salt=self.salt, seed=self.seed)
            keys = self._keys[block_size] = prompt_keys(self.tokens, block_size, root, self.media)
        return keys


@njit(inline="always")
def _rotl(x: Any, r: Any) -> Any:
    return (x << np.uint64(r)) | (x >> np.uint64(64 - r))


@njit(inline="always")
def _round(acc: Any, lane: Any) -> Any:
    return _rotl(acc + lane * _P2, 31) * _P1


@njit(inline="always")
def _lane(words: Any, at: Any) -> Any:
    return np.uint64(words[at]) | (np.uint64(words[at + 1]) << np.uint64(32))


@njit(nogil=True, cache=True)
def xxh64_words(words: Any, start: int, count: int, seed: Any) -> Any:
    """XXH64 of `count` 32-bit words from `start` on; never 0.

    Follows the XXH64 description (Yann Collet, xxHash specification 0.2.0),
    for inputs whose length is a multiple of 4 bytes.
    """
    at, end = start, start + count
    if count >= 8:
        a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while at + 8 <= end:
            a = _round(a, _lane(words, at))
            b = _round(b, _lane(words, at + 2))
            c = _round(c, _lane(words, at + 4))
            d = _round(d, _lane(words, at + 6))
            at += 8
        h = _rotl(a, 1) + _rotl(b, 7) + _rotl(c, 12) + _rotl(d, 18)
        for acc in (a, b, c, d):
            h = (h ^ _round(np.uint64(0), acc)) * _P1 + _P4
    else:
        h = seed + _P5
    h += np.uint64(count) * np.uint64(4)
    while at + 2 <= end:
        h = _rotl(h ^ _round(np.uint64(0), _lane(words, at)), 27) * _P1 + _P4
        at += 2
    if at < end:
        h = _rotl(h ^ (np.uint64(words[at]) * _P1), 23) * _P2 + _P3
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    h ^= h >> np.uint64(32)
    return h if h != np.uint64(0) else np.uint64(1)


@njit(inline="always")
def _put(words: Any, at: Any, digest: Any, offset: Any) -> Any:
    low = np.uint64(0xFFFFFFFF)
    place = np.uint64(offset)
    words[at] = np.uint32(digest & low)
    words[at + 1] = np.uint32(digest >> np.uint64(32))
    words[at + 2] = np.uint32(place & low)
    words[at + 3] = np.uint32(place >> np.uint64(32))
    return at + 4


@njit(nogil=True, cache=True)
def _prompt_pass(
    tokens: Any, size: int, parent: Any, digests: Any, begins: Any, ends: Any, keys: Any
) -> None:
    words = np.empty(size + 4 * len(digests), np.uint32)
    first = 0
    for i in range(len(keys)):
        start, end = i * size, (i + 1) * size
        while first < len(digests) and ends[first] <= start:
            first += 1
        if first == len(digests) or begins[first] >= end:
            parent = xxh64_words(tokens, start, size, parent)
        else:
            words[:size] = tokens[start:end]
            at, item = size, first
            while item < len(digests) and begins[item] < end:
                at = _put(words, at, digests[item], begins[item] - start)
                item += 1
            parent = xxh64_words(words, 0, at, parent)
        keys[i] = parent


@njit(nogil=True, cache=True)
def _run_pass(
    tokens: Any, size: int, parent: Any, starts: Any, digests: Any, offsets: Any, keys: Any
) -> None:
    words = np.empty(size + 4 * len(digests), np.uint32)
    for i in range(len(keys)):
        if starts[i] == starts[i + 1]:
            parent = xxh64_words(tokens, i * size, size, parent)
        else:
            words[:size] = tokens[i * size : (i + 1) * size]
            at = size
            for row in range(starts[i], starts[i + 1]):
                at = _put(words, at, digests[row], offsets[row])
            parent = xxh64_words(words, 0, at, parent)
        keys[i] = parent
