"""Admission and the retry budget, read at every scrape."""

from __future__ import annotations

from router.observe.snapshot import Source, one
from router.request.admission import Admission
from router.request.retry import RetryBudget


def request_gauges(admission: Admission, budget: RetryBudget) -> list[Source]:
    """Places among the concurrent requests, and what is left for retries."""
    return [
        Source(
            "router_requests_waiting",
            "Requests that wait for a place among the concurrent ones.",
            one(lambda: admission.waiting),
        ),
        Source("router_requests_at_work", "Places that are taken.", one(lambda: admission.active)),
        Source(
            "router_requests_at_work_limit",
            "Requests that may be at work at once.",
            one(lambda: admission.limit),
        ),
        Source(
            "router_retry_budget_tokens",
            "Tokens left for retries; there are none at half of the capacity and below.",
            one(lambda: budget.tokens),
        ),
        Source(
            "router_retry_budget_capacity",
            "Tokens of the full retry budget.",
            one(lambda: budget.capacity),
        ),
    ]
