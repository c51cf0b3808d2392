"""Media caches, memory budget and decoder processes, read at every scrape."""

from __future__ import annotations

from router.media.intake import MediaIntake
from router.media.store import Counters
from router.observe.snapshot import Reading, Source, one


def media_gauges(intake: MediaIntake) -> list[Source]:
    """What the intake keeps count of."""
    budget, store = intake.budget, intake.store
    return [
        Source(
            "router_media_cache_requests",
            "Look-ups of downloads by URL, finished tensors by content and picture sizes by URL. "
            "`revalidated` are those misses that the host confirmed with 304.",
            lambda: [
                *_of_cache("url", intake.downloads.counters),
                *_of_cache("content", intake.contents.counters),
                *_of_cache("size", intake.sizes.counters),
            ],
            ("cache", "result"),
            counter=True,
        ),
        Source(
            "router_media_cache_bytes",
            "Memory of downloads and finished tensors that are kept.",
            one(lambda: store.nbytes),
        ),
        Source(
            "router_media_cache_entries",
            "Downloads and finished tensors that are kept.",
            one(lambda: len(store)),
        ),
        Source(
            "router_media_cache_evictions",
            "Downloads and finished tensors dropped for want of room.",
            one(lambda: store.evictions),
            counter=True,
        ),
        Source(
            "router_media_budget_used_bytes",
            "Memory reserved for media at work.",
            one(lambda: budget.used.nbytes),
        ),
        Source(
            "router_media_budget_limit_bytes",
            "Most memory for media at work.",
            one(lambda: budget.limit.nbytes),
        ),
        Source(
            "router_media_budget_used_pixels",
            "Decoded pixels reserved for media at work.",
            one(lambda: budget.used.pixels),
        ),
        Source(
            "router_media_budget_limit_pixels",
            "Most decoded pixels for media at work.",
            one(lambda: budget.limit.pixels),
        ),
        Source(
            "router_media_budget_waiting",
            "Reservations that wait for others to give back.",
            one(lambda: budget.waiting),
        ),
        Source(
            "router_media_decoder_restarts",
            "Decoder processes that had to be killed.",
            one(lambda: intake.decoder.sandbox_restarts),
            counter=True,
        ),
    ]


def _of_cache(cache: str, counters: Counters) -> list[Reading]:
    return [
        ((cache, "hit"), counters.hits),
        ((cache, "miss"), counters.misses),
        ((cache, "revalidated"), counters.revalidated),
    ]
