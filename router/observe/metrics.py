"""The router's metrics: one registry, every name once.

Label values come from registered models and workers and from fixed enums
only; a model name that nobody registered is counted as `unknown`. What
somebody keeps a number of anyway is not counted again here but read when
metrics are scraped: see `snapshot.py` and the rooms' `gauges.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from router.observe.snapshot import Snapshot, Source

# Creation times double the size of a scrape and no dashboard here reads them.
disable_created_metrics()

C = TypeVar("C", bound=Collector)

UNKNOWN_MODEL = "unknown"

# In seconds. A request may take minutes, a stage of a small picture microseconds.
_TOTAL = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200)
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_QUEUE = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_FETCH = (0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STAGE = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01),
    *(0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30),
)
_EVENT_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
_LAG = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)


class Metrics:
    """All that is counted of one router as it happens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counted: list[Collector] = []
        self._snapshots: list[Snapshot] = []
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            self._counted.append(kind(registry=self.registry))
        build = self._keep(Info("router_build", "What runs here.", registry=None))
        build.info({"version": version("mmrouter")})
        self._requests()
        self._attempts()
        self._media()
        self._process()

    def _requests(self) -> None:
        self.requests = self._counter(
            "router_requests",
            "Requests by their one terminal outcome.",
            ["model", "outcome", "reason"],
        )
        self.in_flight = self._keep(
            Gauge("router_requests_in_flight", "Requests at work or waiting.", registry=None)
        )
        self.sheds = self._counter(
            "router_sheds", "Requests refused as workers are overloaded.", ["model"]
        )
        self.queue_wait = self._histogram(
            "router_queue_wait_seconds",
            "Waiting for a place among the concurrent requests.",
            _QUEUE,
        )
        self.first_output = self._histogram(
            "router_first_output_seconds",
            "From a request's arrival to its first output.",
            _FIRST,
            ["model"],
        )
        self.token_time = self._histogram(
            "router_output_token_seconds",
            "Time per output token after the first, of one stream.",
            _TOKEN,
            ["model"],
        )
        self.duration = self._histogram(
            "router_request_seconds", "From a request's arrival to its end.", _TOTAL, ["model"]
        )
        self.prompt_tokens = self._counter(
            "router_prompt_tokens", "Prompt tokens as workers counted them.", ["model"]
        )
        self.expected_prompt_tokens = self._counter(
            "router_expected_prompt_tokens",
            "Prompt tokens of the same requests as the router counted or estimated them, media "
            "expanded.",
            ["model"],
        )
        self.cached_tokens = self._counter(
            "router_cached_tokens",
            "Prompt tokens that workers had in their prefix caches.",
            ["model"],
        )
        self.output_tokens = self._counter(
            "router_output_tokens", "Output tokens relayed.", ["model"]
        )
        self.relayed_bytes = self._counter(
            "router_relayed_bytes", "Bytes passed from workers to clients."
        )
        self.relayed_messages = self._counter(
            "router_relayed_messages", "Messages passed from workers to clients."
        )
        self.joined_messages = self._counter(
            "router_joined_messages",
            "Of the relayed messages, those that waited and went out as a part of another.",
        )
        self.unauthenticated = self._counter(
            "router_unauthenticated", "Calls refused for want of a bearer token.", ["service"]
        )

    def _attempts(self) -> None:
        self.selections = self._counter(
            "router_selections",
            "Choices of a worker, by the policy that made them and the leg they are for.",
            ["policy", "leg"],
        )
        self.attempts = self._counter(
            "router_attempts", "Calls of workers, by how they ended.", ["worker", "result"]
        )
        self.retries = self._counter(
            "router_retries", "Further attempts, by what failed before.", ["cause"]
        )
        self.breaker_transitions = self._counter(
            "router_breaker_transitions", "Changes of a breaker.", ["worker", "to"]
        )
        self.load_reports = self._counter(
            "router_worker_load_reports",
            "Load reports of a worker: pushed, polled, unknown (it has none) or failed.",
            ["worker", "source"],
        )
        self.prefix_blocks_asked = self._counter(
            "router_prefix_blocks_asked", "KV blocks of prompts that were looked up.", ["model"]
        )
        self.prefix_blocks_matched = self._counter(
            "router_prefix_blocks_matched",
            "KV blocks of prompts that the chosen worker was believed to hold.",
            ["model"],
        )

        self.kv_event_lag = self._histogram(
            "router_kv_event_lag_seconds",
            "From a worker's change of its KV cache, by its clock, to the router's index.",
            _EVENT_LAG,
        )

    def _media(self) -> None:
        self.mm_processing = self._counter(
            "router_mm_processing",
            "Requests with media by where the media become tensors.",
            ["model", "mode", "reason"],
        )
        self.fetch = self._histogram(
            "router_media_fetch_seconds",
            "Fetching or unpacking one media item, caches included.",
            _FETCH,
        )
        self.stage = self._histogram(
            "router_media_stage_seconds",
            "One stage of one media item, waiting for a thread included.",
            _STAGE,
            ["stage"],
        )
        self.media_bytes = self._counter(
            "router_media_bytes", "Encoded media taken in.", ["source"]
        )
        self.media_pixels = self._counter(
            "router_media_pixels", "Pixels decoded, of all frames.", ["modality"]
        )
        self.missing_identity = self._counter(
            "router_media_identity_missing",
            "Prefill legs that returned no identity of the media they processed.",
        )
        self.vision_fallbacks = self._counter(
            "router_vision_fallbacks", "Pictures that the device failed at and the CPU packed."
        )

    def _process(self) -> None:
        self.loop_lag = self._histogram(
            "router_loop_lag_seconds", "How late the event loop woke from a short sleep.", _LAG
        )

    def show(self, sources: Sequence[Source]) -> None:
        """Adds what is read at each scrape."""
        snapshot = Snapshot(sources)
        self.registry.register(snapshot)
        self._snapshots.append(snapshot)

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The text in the format that the Accept header asks for, and its content type.

        Values are read at once; text is made of them in a thread, since with
        many workers that takes milliseconds.
        """
        encode, content_type = encoder(accept)
        scraped = _Scraped([*self._counted, *(snapshot.taken() for snapshot in self._snapshots)])
        return await asyncio.to_thread(encode, scraped), content_type

    def forget_worker(self, worker: str) -> None:
        """Drops the series of a worker that is gone."""
        for metric in (self.attempts, self.breaker_transitions, self.load_reports):
            metric.remove_by_labels({"worker": worker})

    def _counter(self, name: str, about: str, labels: Sequence[str] = ()) -> Counter:
        return self._keep(Counter(name, about, labels, registry=None))

    def _histogram(
        self, name: str, about: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return self._keep(Histogram(name, about, labels, buckets=buckets, registry=None))

    def _keep(self, collector: C) -> C:
        self.registry.register(collector)
        self._counted.append(collector)
        return collector


def encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """What writes metrics in the format that an Accept header asks for, and its content type.

    A header that cannot be read asks for nothing in particular.
    """
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError):  # the library compares versions of whatever kind
        return choose_encoder("")


@dataclass(frozen=True)
class _Scraped(Collector):
    parts: Sequence[Collector]

    def collect(self) -> Iterator[Metric]:
        for part in self.parts:
            yield from part.collect()
