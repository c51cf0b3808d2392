"""The prefix index and its event streams, read at every scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.observe.snapshot import Reading, Source
from router.prefix.events import EventReader
from router.prefix.index import PrefixIndex
from router.prefix.learn import Learner

Indexes = Callable[[], Iterable[tuple[str, PrefixIndex]]]
Readers = Callable[[], Iterable[tuple[str, EventReader]]]
Learners = Callable[[], Iterable[tuple[str, Learner]]]


def prefix_gauges(indexes: Indexes, readers: Readers, learners: Learners) -> list[Source]:
    """`indexes` and `learners` give each model's by its name, `readers` each worker's by its
    address.
    """

    def of_index(value: Callable[[PrefixIndex], float]) -> Callable[[], list[Reading]]:
        return lambda: [((model,), value(index)) for model, index in indexes()]

    def of_reader(value: Callable[[EventReader], float]) -> Callable[[], list[Reading]]:
        return lambda: [((worker,), value(reader)) for worker, reader in readers()]

    def of_learner(value: Callable[[Learner], float]) -> Callable[[], list[Reading]]:
        return lambda: [((model,), value(learner)) for model, learner in learners()]

    return [
        Source(
            "router_media_names",
            "References to media of which the workers' identifiers are known.",
            of_learner(len),
            ("model",),
        ),
        Source(
            "router_media_names_learned",
            "Identifiers of media that were learned from events.",
            of_learner(lambda learner: learner.learned),
            ("model",),
            counter=True,
        ),
        Source(
            "router_media_names_ambiguous",
            "Media of which events did not tell whose they were, so that nothing was learned.",
            of_learner(lambda learner: learner.ambiguous),
            ("model",),
            counter=True,
        ),
        Source(
            "router_prefix_index_blocks",
            "Different KV blocks that workers report to hold.",
            of_index(lambda index: index.blocks),
            ("model",),
        ),
        Source(
            "router_prefix_index_holdings",
            "Pairs of a worker's rank and a KV block that it reports to hold.",
            of_index(lambda index: index.held),
            ("model",),
        ),
        Source(
            "router_prefix_index_expected_blocks",
            "KV blocks known from the router's own choices only.",
            of_index(lambda index: index.expected),
            ("model",),
        ),
        Source(
            "router_prefix_index_evictions",
            "KV blocks dropped from the index for want of room.",
            of_index(lambda index: index.evicted),
            ("model",),
            counter=True,
        ),
        Source(
            "router_prefix_index_orphans",
            "KV blocks reported without a beginning that is known.",
            of_index(lambda index: index.orphans),
            ("model",),
            counter=True,
        ),
        Source(
            "router_kv_event_resyncs",
            "Times that a worker's reported blocks were forgotten, as events were missing.",
            of_reader(lambda reader: reader.resyncs),
            ("worker",),
            counter=True,
        ),
        Source(
            "router_kv_event_repeats",
            "Event batches that were known already.",
            of_reader(lambda reader: reader.repeated),
            ("worker",),
            counter=True,
        ),
    ]
