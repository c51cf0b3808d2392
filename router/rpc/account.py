"""What is told of a request when it has ended: metrics, a log line, its span, the last errors."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from prometheus_client import Counter

from router.observe.logging import get_logger
from router.observe.metrics import Metrics
from router.observe.recent import RecentFailures
from router.observe.tracing import Span, Tracing, Value
from router.request.attempt import shown_id
from router.request.record import Record

_log = get_logger("request")


@dataclass(frozen=True)
class Ending:
    """How a request ended. `outcome` and `reason` are of fixed sets, `code` a gRPC status'."""

    outcome: str
    reason: str = ""
    code: str = "OK"
    message: str = ""


OK = Ending("ok")
CANCELLED = Ending("client_cancelled", code="CANCELLED")
# The client's own deadline ended the call, which is a cancel of another kind.
TOO_LATE = Ending("client_cancelled", "deadline", "DEADLINE_EXCEEDED")
# Stands until it is known better.
UNKNOWN = Ending("internal", "internal", "UNKNOWN")

# Outcomes that are nobody's failure.
_NO_ERROR = ("ok", "client_cancelled")
# A sentence may quote a worker, or what a client calls its model.
_LONGEST_WHY = 300


class _Model:
    """One model's series, looked up once: there are several for each request."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._requests = metrics.requests
        self._model = model
        self._endings: dict[tuple[str, str], Counter] = {}
        self.duration = metrics.duration.labels(model)
        self.first_output = metrics.first_output.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.expected_prompt_tokens = metrics.expected_prompt_tokens.labels(model)
        self.cached_tokens = metrics.cached_tokens.labels(model)
        self.output_tokens = metrics.output_tokens.labels(model)
        self.token_time = metrics.token_time.labels(model)

    def ended(self, outcome: str, reason: str) -> Counter:
        counter = self._endings.get((outcome, reason))
        if counter is None:
            counter = self._requests.labels(self._model, outcome, reason)
            self._endings[outcome, reason] = counter
        return counter


@dataclass(frozen=True)
class Accounts:
    """Where the accounts of requests go."""

    metrics: Metrics
    tracing: Tracing = field(default_factory=Tracing)
    failures: RecentFailures = field(default_factory=RecentFailures)
    _models: dict[str, _Model] = field(default_factory=dict)

    def close(self, record: Record, ending: Ending, seconds: float, span: Span) -> None:
        """Tells how a request ended, `seconds` after it came."""
        # Both clocks are the monotonic one, so a moment can be told as an age.
        first = record.journey.first_output_at
        to_first = None if first is None else seconds - (time.monotonic() - first)
        self._count(record, ending, seconds, to_first)
        self._log(record, ending, seconds, to_first)
        if ending.outcome not in _NO_ERROR:
            self.failures.add(
                record.model, ending.outcome, ending.reason, ending.message, record.request_id
            )
        if self.tracing.on:
            span.tell(_attributes(record, ending, to_first))
            if ending.outcome not in _NO_ERROR:
                span.fail(ending.reason, ending.message)

    def _count(
        self, record: Record, ending: Ending, seconds: float, to_first: float | None
    ) -> None:
        metrics, journey = self.metrics, record.journey
        model = self._models.get(record.model)
        if model is None:
            # Names are those of registered models, or one for all others.
            model = self._models[record.model] = _Model(metrics, record.model)
        model.ended(ending.outcome, ending.reason).inc()
        model.duration.observe(seconds)
        if ending.reason == "overloaded":
            metrics.sheds.labels(record.model).inc()
        if to_first is None:
            return
        model.first_output.observe(to_first)
        messages = 0
        for part in journey.parts:
            messages += part.messages
            metrics.relayed_bytes.inc(part.nbytes)
            if part.joined:
                metrics.joined_messages.inc(part.joined)
        metrics.relayed_messages.inc(messages)
        if prompt_tokens := journey.prompt_tokens:
            model.prompt_tokens.inc(prompt_tokens)
            model.expected_prompt_tokens.inc(record.prompt_tokens)
        if journey.progress.cached_tokens:
            model.cached_tokens.inc(journey.progress.cached_tokens)
        tokens = journey.output_tokens
        model.output_tokens.inc(tokens)
        if messages > 1 and tokens > 1 and journey.first_output_at is not None:
            last_at = max(part.last_at for part in journey.parts)
            model.token_time.observe((last_at - journey.first_output_at) / (tokens - 1))

    def _log(self, record: Record, ending: Ending, seconds: float, to_first: float | None) -> None:
        if not _log.is_enabled_for(logging.INFO):
            return
        progress, resolution = record.journey.progress, record.resolution
        told = {
            "mode": resolution.mode.value if resolution else None,
            "mode_reason": resolution.why.value if resolution else None,
            "worker": record.journey.worker or None,
            "reason": ending.reason or None,
            # The sentence that the client gets: which item, which host, which limit.
            "why": ending.message[:_LONGEST_WHY] or None,
            "first_output_seconds": None if to_first is None else round(to_first, 4),
            "finish": ",".join(progress.finish_reasons) or None,
        }
        _log.info(
            "request",
            model=record.model,
            outcome=ending.outcome,
            attempts=record.journey.attempts,
            seconds=round(seconds, 4),
            prompt_tokens=record.journey.prompt_tokens or record.prompt_tokens,
            cached_tokens=progress.cached_tokens,
            output_tokens=record.journey.output_tokens,
            **{key: value for key, value in told.items() if value is not None},
        )


def _attributes(record: Record, ending: Ending, to_first: float | None) -> dict[str, Value]:
    progress, resolution = record.journey.progress, record.resolution
    attributes: dict[str, Value] = {
        "rpc.response.status_code": ending.code,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.journey.prompt_tokens or record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.journey.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": progress.cached_tokens,
        # A client's may be of any length, and a collector takes batches of a few megabytes.
        "mmrouter.request_id": shown_id(record.request_id),
        "mmrouter.attempts": record.journey.attempts,
        "mmrouter.outcome": ending.outcome,
    }
    if progress.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = progress.finish_reasons
    if to_first is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = to_first
    if resolution is not None:
        attributes["mmrouter.mm_processing.mode"] = resolution.mode.value
        attributes["mmrouter.mm_processing.reason"] = resolution.why.value
    return attributes
