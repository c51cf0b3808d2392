"""Compiles the room's loops before a request needs them."""

from __future__ import annotations

import numpy as np

from router.prefix.blocks import BlockExtras, MediaSpan, PromptBlocks, identifier_digest
from router.prefix.changes import Cleared, Removed, Stored
from router.prefix.index import IndexSettings, PrefixIndex


def compile_ahead() -> None:
    """Runs each compiled loop once: half a minute on a new machine, then read from numba's cache.

    To be called from a thread, before the first request that is routed by prefix.
    """
    index = PrefixIndex(IndexSettings(blocks=16, expected_blocks=16))
    holder = index.join()
    ids = np.arange(8, dtype=np.uint32)
    keys = PromptBlocks(ids, [MediaSpan("", 1, 2)]).keys(4)
    extras = BlockExtras(
        np.array([0, 1, 1], np.int64),
        np.array([identifier_digest("")], np.uint64),
        np.array([1], np.int64),
        ("",),
    )
    hashes = np.array([1, 2], np.int64)
    index.apply(holder, Stored(hashes, None, ids, 4, extras))
    index.apply(holder, Stored(hashes + 2, 2, ids, 4))
    index.expect(holder, keys, 1.0)
    index.match(keys, [holder])
    index.use(keys)
    index.apply(holder, Removed(hashes))
    index.apply(holder, Cleared())
