"""The router's metrics: one registry, every name once.

Label values come from registered models and workers and from fixed enums
only; a model name that nobody registered is counted as `unknown`.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

# Creation times double the size of a scrape and no dashboard here reads them.
disable_created_metrics()

UNKNOWN_MODEL = "unknown"

_TOTAL_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200)
_FIRST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STAGE_SECONDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_LAG_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)


class Metrics:
    """All metrics of one router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "router_requests",
            "Requests by their one terminal outcome.",
            ["model", "outcome", "reason"],
            registry=r,
        )
        self.in_flight = Gauge(
            "router_requests_in_flight", "Requests at work or waiting.", registry=r
        )
        self.worker_in_flight = Gauge(
            "router_worker_in_flight",
            "Requests that a worker holds for us.",
            ["worker"],
            registry=r,
        )
        self.worker_state = Gauge(
            "router_worker_state",
            "1 for the state that a worker is in.",
            ["worker", "state"],
            registry=r,
        )
        self.load_reports = Counter(
            "router_worker_load_reports",
            "Load reports of a worker: pushed, polled, unknown (it has none) or failed.",
            ["worker", "source"],
            registry=r,
        )
        self.mm_processing = Counter(
            "router_mm_processing",
            "Requests with media by where the media become tensors.",
            ["model", "mode", "reason"],
            registry=r,
        )
        self.attempts = Counter(
            "router_attempts", "Calls of workers.", ["worker", "result"], registry=r
        )
        self.retries = Counter(
            "router_retries", "Further attempts, by what failed before.", ["cause"], registry=r
        )
        self.retry_budget = Gauge(
            "router_retry_budget_tokens", "Tokens left for retries.", registry=r
        )
        self.missing_identity = Counter(
            "router_media_identity_missing",
            "Prefill legs that returned no identity of the media they processed.",
            registry=r,
        )
        self.sheds = Counter(
            "router_sheds",
            "Requests refused as workers are overloaded.",
            ["model"],
            registry=r,
        )
        self.breaker_transitions = Counter(
            "router_breaker_transitions", "Changes of a breaker.", ["worker", "to"], registry=r
        )
        self.unauthenticated = Counter(
            "router_unauthenticated",
            "Calls refused for want of a bearer token.",
            ["service"],
            registry=r,
        )
        self.first_output = Histogram(
            "router_first_output_seconds",
            "From a request's arrival to its first output.",
            ["model"],
            buckets=_FIRST_SECONDS,
            registry=r,
        )
        self.duration = Histogram(
            "router_request_seconds",
            "From a request's arrival to its end.",
            ["model"],
            buckets=_TOTAL_SECONDS,
            registry=r,
        )
        self.queue_wait = Histogram(
            "router_queue_wait_seconds",
            "Waiting for a place among the concurrent requests.",
            buckets=_STAGE_SECONDS,
            registry=r,
        )
        self.stage = Histogram(
            "router_media_stage_seconds",
            "One stage of one media item.",
            ["stage"],
            buckets=_STAGE_SECONDS,
            registry=r,
        )
        self.media_bytes = Counter(
            "router_media_bytes", "Encoded media taken in.", ["source"], registry=r
        )
        self.token_time = Histogram(
            "router_output_token_seconds",
            "Time per output token after the first, of one stream.",
            ["model"],
            buckets=_TOKEN_SECONDS,
            registry=r,
        )
        self.cached_tokens = Counter(
            "router_cached_tokens",
            "Prompt tokens that workers had in their prefix caches.",
            ["model"],
            registry=r,
        )
        self.selections = Counter(
            "router_selections",
            "Choices of a worker, by the policy that made them.",
            ["policy"],
            registry=r,
        )
        self.loop_lag = Histogram(
            "router_loop_lag_seconds",
            "How late the event loop woke from a short sleep.",
            buckets=_LAG_SECONDS,
            registry=r,
        )
        self.relayed_bytes = Counter(
            "router_relayed_bytes", "Bytes passed from workers to clients.", registry=r
        )
        self.relayed_messages = Counter(
            "router_relayed_messages", "Messages passed from workers to clients.", registry=r
        )
        self.prompt_tokens = Counter(
            "router_prompt_tokens", "Prompt tokens as workers counted them.", ["model"], registry=r
        )
        self.output_tokens = Counter(
            "router_output_tokens", "Output tokens relayed.", ["model"], registry=r
        )

    def forget_worker(self, worker: str) -> None:
        """Drops the series of a worker that is gone."""
        for metric in (
            self.worker_in_flight,
            self.worker_state,
            self.load_reports,
            self.attempts,
            self.breaker_transitions,
        ):
            metric.remove_by_labels({"worker": worker})

    def render(self, accept: str) -> tuple[bytes, str]:
        """The registry in the text format that the Accept header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
