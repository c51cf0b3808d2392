"""What the status page shows, gathered from the rooms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version

from prometheus_client import Counter
from prometheus_client.samples import Sample

from router.config import Settings
from router.fleet.capability import Capability
from router.fleet.registry import Registry
from router.fleet.role import effective_role
from router.fleet.worker import Worker
from router.media.intake import MediaIntake
from router.media.store import Counters
from router.observe.history import History, Trend
from router.observe.statusz import ModeRow, Status, WorkerRow, ago
from router.request.pipeline import Pipeline
from router.rpc.account import Accounts
from router.units import format_size

_FAILED = frozenset({"client_fault", "overloaded", "unavailable", "worker_failed", "internal"})


class StatusPage:
    """Owns the history of rates; everything else is asked for when the page is."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        pipeline: Pipeline,
        intake: MediaIntake,
        accounts: Accounts,
        backend: str,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._pipeline = pipeline
        self._intake = intake
        self._accounts = accounts
        self._backend = backend
        self._began = time.monotonic()
        metrics, admission = accounts.metrics, pipeline.admission
        self.history = History(
            [
                Trend("requests/s", lambda: _sum(metrics.requests), rate=True),
                Trend("errors/s", lambda: _sum(metrics.requests, _is_error), rate=True),
                Trend("at work", lambda: admission.active),
                Trend("waiting", lambda: admission.waiting),
                Trend("tokens/s", lambda: _sum(metrics.output_tokens), rate=True),
                Trend("media B/s", lambda: _sum(metrics.media_bytes), rate=True),
            ]
        )

    def status(self, not_ready: str | None) -> Status:
        """As of now."""
        now = time.monotonic()
        return Status(
            now=now,
            not_ready=not_ready,
            facts=list(self._facts(now)),
            workers=[_worker(worker, self._registry.clock()) for worker in self._registry],
            modes=list(self._modes()),
            failures=self._accounts.failures.latest_first(),
            caches=list(self._caches()),
            series=self.history.series(),
            series_length=self.history.length,
            series_seconds=self.history.seconds,
        )

    def _facts(self, now: float) -> Iterable[tuple[str, str]]:
        settings, admission = self._settings, self._pipeline.admission
        yield "version", version("mmrouter")
        yield "up for", ago(now - self._began)
        yield "at work", f"{admission.active} of {admission.limit}"
        yield "waiting", f"{admission.waiting} of {settings.queue_size}"
        yield "policy", settings.policy
        yield "media", settings.mm_processing
        yield "vision backend", self._backend

    def _modes(self) -> Iterable[ModeRow]:
        counted: dict[str, list[str]] = {}
        for sample in _samples(self._accounts.metrics.mm_processing):
            labels = sample.labels
            told = f"{labels['mode']} ({labels['reason']}) {sample.value:.0f}"
            counted.setdefault(labels["model"], []).append(told)
        for (model, modalities), last in self._pipeline.resolutions.items():
            yield ModeRow(
                model,
                ", ".join(sorted(modalities)),
                last.mode.value,
                last.why.value,
                "; ".join(counted.get(model, ())),
            )

    def _caches(self) -> Iterable[tuple[str, str]]:
        intake = self._intake
        yield "downloads", _hits(intake.downloads.counters)
        yield "finished tensors", _hits(intake.contents.counters)
        store = intake.store
        yield (
            "kept",
            f"{_size(store.nbytes)} in {len(store)} entries, {store.evictions} evicted",
        )
        used, limit = intake.budget.used, intake.budget.limit
        yield "memory at work", f"{_size(used.nbytes)} of {_size(limit.nbytes)}"
        yield "pixels at work", f"{used.pixels / 1e6:.1f} of {limit.pixels / 1e6:.0f} megapixels"
        yield "waiting for memory", str(intake.budget.waiting)


def _worker(worker: Worker, now: float) -> WorkerRow:
    report = worker.load.reported
    return WorkerRow(
        address=worker.address,
        state=worker.state.value,
        reason=worker.state_reason,
        since=worker.seconds_in_state,
        model=worker.model_name or "",
        role=effective_role(worker).value,
        media=_media(worker.capability) if worker.capability else "",
        in_flight=worker.load.in_flight,
        running=report.running if report else None,
        waiting=report.waiting if report else None,
        kv_usage=report.kv_usage if report else None,
        load_age=now - report.at if report else None,
        breaker=worker.breaker.state.value,
    )


def _media(capability: Capability) -> str:
    if capability.takes_media_refs:
        return f"references ({', '.join(sorted(capability.schemes))})"
    return "raw pixels" if capability.device_normalize else "tensors"


def _hits(counters: Counters) -> str:
    asked = counters.hits + counters.misses
    if not asked:
        return "not asked yet"
    return f"{counters.hits} of {asked} found ({counters.hits / asked:.0%})"


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.0f}MiB"


def _is_error(labels: dict[str, str]) -> bool:
    return labels["outcome"] in _FAILED


def _samples(counter: Counter) -> Sequence[Sample]:
    (family,) = counter.collect()
    return family.samples


def _sum(counter: Counter, wanted: Callable[[dict[str, str]], bool] = lambda _: True) -> float:
    return float(sum(s.value for s in _samples(counter) if wanted(s.labels)))
