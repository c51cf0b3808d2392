"""What batches of a worker's event stream do to the index."""

from __future__ import annotations

import numpy as np
import pytest

from router.prefix.blocks import MediaSpan, PromptBlocks
from router.prefix.events import EventReader, Loaded, Resync
from router.prefix.index import IndexSettings, PrefixIndex
from router.prefix.resident import Resident
from router.wire import common
from tests.prefix.batches import (
    SIZE,
    batch,
    beat,
    chunk,
    cleared,
    ids,
    picture,
    removed,
    stored,
)


class Listener:
    """A worker's reader and place in an index, without a stream."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index = index or PrefixIndex(
            IndexSettings(blocks=256, expected_blocks=64), clock=lambda: 0.0, seed=1
        )
        self.reader = EventReader()
        self.resident = Resident(self.index, block_size=16)
        self.resyncs: list[str] = []
        self.loads: list[int] = []

    def hear(self, *batches: common.KvEventBatch) -> None:
        for one in batches:
            for action in self.reader.apply(one):
                match action:
                    case Resync(reason=reason):
                        self.resyncs.append(reason)
                    case Loaded(load=load):
                        self.loads.append(load.waiting_requests)
                    case _:
                        self.resident.apply(one.dp_rank, action)

    def has(self, tokens: np.ndarray, media: list[MediaSpan] | None = None, **names: str) -> int:
        prompt = PromptBlocks(tokens, media or [], seed=1, **names)  # type: ignore[arg-type]
        holders = self.resident.holders
        return int(self.index.match(prompt.keys(SIZE), holders).blocks[holders].max())


def three() -> list[common.KvEventBatch]:
    return [batch(n + 1, stored(ids(1, 100 * n), first=10 * n)) for n in range(3)]


def test_a_worker_that_comes_back_starts_over_without_a_resync() -> None:
    old = Listener()
    old.hear(*three())
    old.resident.leave()
    assert (old.index.blocks, old.index.held) == (0, 0)
    new = Listener(old.index)
    new.hear(*three()[:2])
    assert (new.has(ids(1)), new.has(ids(1, 100)), new.has(ids(1, 200))) == (1, 1, 0)
    assert new.resyncs == []


def test_what_a_gone_worker_still_sends_changes_nothing() -> None:
    it = Listener()
    it.resident.leave()
    it.hear(*three())
    assert it.index.blocks == 0


def test_a_gap_causes_one_resync() -> None:
    it = Listener()
    it.hear(*three()[:2], batch(5, stored(ids(1, 900))), batch(6), batch(9))
    assert len(it.resyncs) == 1
    assert it.index.blocks == 0


def test_after_a_resync_the_stream_counts_from_where_it_is() -> None:
    it = Listener()
    it.hear(*three()[:2], batch(5))
    it.reader.opened()
    it.hear(batch(8, stored(ids(2))), batch(9, stored(ids(3)[8:], first=102, parent=101)))
    assert len(it.resyncs) == 1
    assert it.has(ids(3)) == 3


@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_batch_seen_before_changes_nothing(late: int) -> None:
    it = Listener()
    it.hear(*three())
    it.hear(batch(late, removed(0, 10, 20), cleared()))
    assert (it.index.blocks, it.resyncs, it.reader.repeated) == (3, [], 1)


def test_a_replayed_batch_does_not_count_twice() -> None:
    it = Listener()
    it.hear(*three(), three()[1], batch(4, removed(10)))
    assert it.index.held == 2


def test_a_broken_connection_costs_nothing_when_nothing_was_missed() -> None:
    it = Listener()
    it.hear(*three())
    it.reader.opened()
    it.hear(beat(3), batch(4, stored(ids(1, 300), first=30)))
    assert (it.index.blocks, it.reader.resyncs) == (4, 0)


@pytest.mark.parametrize("number", [1, 3, 5])
def test_another_number_after_a_broken_connection_means_another_story(number: int) -> None:
    it = Listener()
    it.hear(*three())
    it.reader.opened()
    it.hear(batch(number, stored(ids(1, 500), first=50)))
    assert (it.index.blocks, it.resyncs) == (1, [])
    assert it.has(ids(1, 500)) == 1
    it.hear(batch(number + 1, stored(ids(1, 600), first=60)))
    assert it.index.blocks == 2


def test_a_restarted_engine_that_has_published_nothing_yet_has_nothing() -> None:
    it = Listener()
    it.hear(*three())
    it.reader.opened()
    it.hear(beat(0))
    assert (it.index.blocks, it.resyncs) == (0, [])
    it.hear(batch(1, stored(ids(1))))
    assert (it.index.blocks, it.reader.resyncs) == (1, 1)


def test_what_the_worker_lost_is_forgotten() -> None:
    it = Listener()
    it.hear(*three())
    assert it.reader.lost() == [0]


def test_each_rank_counts_its_own_batches() -> None:
    it = Listener()
    it.hear(
        batch(1, stored(ids(2))),
        batch(7, stored(ids(1)), rank=1),
        batch(2),
        batch(8, rank=1),
    )
    assert it.resyncs == []
    holders = it.resident.holders
    keys = PromptBlocks(ids(2), seed=1).keys(SIZE)
    assert sorted(it.index.match(keys, holders).blocks[holders].tolist()) == [1, 2]


def test_a_gap_of_one_rank_leaves_the_others() -> None:
    it = Listener()
    it.hear(batch(1, stored(ids(2))), batch(1, stored(ids(1, 500)), rank=1), batch(3))
    assert it.index.blocks == 1
    it.reader.opened()
    it.hear(batch(2, stored(ids(1, 600), first=7), rank=1), batch(4, stored(ids(1))))
    assert (it.index.blocks, len(it.resyncs)) == (3, 1)


def test_load_alone_is_handed_on_and_is_no_batch() -> None:
    it = Listener()
    it.hear(beat(0, sample=1, waiting=4), *three(), beat(3, sample=2, waiting=9))
    assert it.loads == [4, 9]
    assert (it.resyncs, it.reader.repeated) == ([], 0)


def test_older_load_records_are_dropped() -> None:
    it = Listener()
    it.hear(beat(0, sample=5, waiting=1), beat(0, sample=4, waiting=2), beat(0, sample=6))
    assert it.loads == [1, 0]


def test_a_heartbeat_shows_that_batches_are_missing() -> None:
    it = Listener()
    it.hear(*three(), beat(5))
    assert len(it.resyncs) == 1


def test_a_snapshot_replaces_what_was_known() -> None:
    it = Listener()
    it.hear(*three())
    it.hear(
        chunk(0, 2, 40, stored(ids(2))),
        chunk(1, 2, 40, stored(ids(3)[8:], first=102, parent=101)),
        batch(41, stored(ids(4)[12:], first=103, parent=102)),
    )
    assert (it.has(ids(4)), it.index.blocks, it.resyncs) == (4, 4, [])


def test_a_snapshot_with_a_hole_causes_a_resync() -> None:
    it = Listener()
    it.hear(chunk(0, 3, 40, stored(ids(2))), chunk(2, 3, 40))
    assert (it.index.blocks, len(it.resyncs)) == (0, 1)


def test_the_block_size_is_learned() -> None:
    it = Listener()
    assert it.resident.block_size == 16
    it.hear(*three())
    assert it.resident.block_size == SIZE


def test_an_image_matches_in_its_place_and_no_other_does() -> None:
    it = Listener()
    tokens = np.full(4 * SIZE, 9, np.uint32)
    it.hear(
        batch(
            1,
            stored(tokens, extras=[[], [picture("cat", 2)], [picture("cat", -2)], []]),
        )
    )
    assert it.has(tokens, [MediaSpan("cat", 6, 6)]) == 4
    assert it.has(tokens, [MediaSpan("cat", 7, 5)]) == 1
    assert it.has(tokens, [MediaSpan("dog", 6, 6)]) == 1
    assert it.has(tokens) == 1


def test_adapter_and_salt_in_the_events_fields() -> None:
    it = Listener()
    it.hear(batch(1, stored(ids(2), lora_name="sql", cache_salt="tenant")))
    assert it.has(ids(2), lora="sql", salt="tenant") == 2
    assert it.has(ids(2), lora="sql") == 0


def test_adapter_and_salt_among_the_extra_keys_say_the_same() -> None:
    it = Listener()
    text = common.KvBlockExtraKey
    extras = [[text(text="sql"), text(text="tenant")], [text(text="sql")]]
    it.hear(batch(1, stored(ids(2), extras=extras, lora_name="sql")))
    assert it.has(ids(2), lora="sql", salt="tenant") == 2


def test_a_salt_among_the_extra_keys_alone() -> None:
    it = Listener()
    it.hear(batch(1, stored(ids(1), extras=[[common.KvBlockExtraKey(text="tenant")]])))
    assert (it.has(ids(1), salt="tenant"), it.has(ids(1))) == (1, 0)


def test_unknown_content_matches_no_request() -> None:
    it = Listener()
    it.hear(batch(1, stored(ids(2), extras=[[], [common.KvBlockExtraKey(blob=b"embeds")]])))
    assert it.has(ids(2)) == 1


@pytest.mark.parametrize(
    ("fields", "weight"),
    [
        ({}, 1),
        ({"tier": common.KV_CACHE_TIER_DEVICE}, 1),
        ({"tier": common.KV_CACHE_TIER_HOST}, 0.75),
        ({"tier": common.KV_CACHE_TIER_EXTERNAL}, 0.25),
        ({"medium": "GPU"}, 1),
        ({"medium": "cpu"}, 0.75),
        ({"medium": "nvme"}, 0.25),
    ],
)
def test_tiers(fields: dict[str, object], weight: float) -> None:
    it = Listener()
    it.hear(batch(1, stored(ids(1), **fields)))
    match = it.index.match(PromptBlocks(ids(1), seed=1).keys(SIZE), it.resident.holders)
    assert match.weights.max() == weight
    it.hear(batch(2, removed(100, **fields)))
    assert it.index.blocks == 0


def test_windowed_cache_groups_are_left_out() -> None:
    it = Listener()
    it.hear(
        batch(1, stored(ids(2), group_idx=1, kv_cache_spec_kind="full_attention")),
        batch(2, stored(ids(2), group_idx=0, kv_cache_spec_sliding_window=1024)),
        batch(3, removed(100, 101, group_idx=0)),
    )
    assert it.has(ids(2)) == 2
    it.hear(batch(4, removed(101, group_idx=1)))
    assert it.has(ids(2)) == 1


def test_a_run_ends_at_a_block_that_is_not_full() -> None:
    it = Listener()
    event = stored(ids(3))
    del event.stored.blocks[1].token_ids[-1]
    it.hear(batch(1, event))
    assert it.has(ids(3)) == 1


def test_an_empty_run_is_nothing() -> None:
    it = Listener()
    it.hear(batch(1, common.KvCacheEvent(stored=common.KvBlocksStored())))
    assert it.index.blocks == 0


def test_size_returns_to_the_baseline() -> None:
    it = Listener()
    for round in range(5):
        it.reader.opened()
        it.hear(*[batch(n + 10 * round, stored(ids(3, 50 * n), first=5 * n)) for n in range(4)])
    it.hear(batch(44, cleared()))
    assert (it.index.blocks, it.index.held) == (0, 0)
