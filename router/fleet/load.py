"""What a worker has to do: as it reported, and as we reserved.

A reservation is made in the same step as the choice and given back exactly
once, on the object that it was taken from. Reports come in two ways: pushed
by the worker along with its events, or asked for with GetLoads while nothing
is pushed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import isfinite

from router.fleet.pressure import Backlog, Place
from router.wire import common, engine

# Seconds after which a push is no sign that more will come; heartbeats are one a second.
_PUSH_PATIENCE = 5.0
# The most that any engine can have of anything that is counted, and the most ranks.
_MOST = 1 << 30
_MOST_RANKS = 1024


class LoadSource(Enum):
    """Where knowledge of a load came from, or why there is none. UNKNOWN is not FAILED:
    a worker that has no such report is not ill.
    """

    PUSHED = "pushed"
    POLLED = "polled"
    UNKNOWN = "unknown"
    FAILED = "failed"


@dataclass(frozen=True)
class ReportedLoad:
    """One report; None where the worker did not say. `at` is in seconds.

    `silence` is for how many seconds the engine has given no output in spite
    of having work. Over several data-parallel ranks counts are sums, and shares
    and silence those of the worst rank.
    """

    at: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    waiting_uncached_tokens: int | None = None
    prefill_pending_tokens: int | None = None
    silence: float | None = None

    @property
    def pending_tokens(self) -> int | None:
        """Prompt tokens that wait to be computed."""
        if self.prefill_pending_tokens is not None:
            return self.prefill_pending_tokens
        return self.waiting_uncached_tokens

    @classmethod
    def of_scheduler(cls, loads: Iterable[engine.SchedulerLoad], at: float) -> ReportedLoad:
        """From the ranks of a GetLoads answer, of which there is at least one."""
        ranks = list(loads)
        return cls(
            at=at,
            running=_sum(x.num_running_reqs for x in ranks),
            waiting=_sum(x.num_waiting_reqs for x in ranks),
            kv_usage=_highest_share(x.token_usage for x in ranks),
            waiting_uncached_tokens=_sum(x.num_waiting_uncached_tokens for x in ranks),
        )

    @classmethod
    def of_engine(cls, loads: Iterable[common.EngineLoad], at: float) -> ReportedLoad:
        """From the last record of each rank, of which there is at least one."""
        ranks = list(loads)
        silences = [x.engine_silence_ms / 1000 for x in ranks if x.HasField("engine_silence_ms")]
        return cls(
            at=at,
            running=_sum(x.running_requests for x in ranks),
            waiting=_sum(x.waiting_requests for x in ranks),
            kv_usage=_highest_share(x.token_usage for x in ranks),
            waiting_uncached_tokens=_sum_of_known(ranks, "waiting_uncached_tokens"),
            prefill_pending_tokens=_sum_of_known(ranks, "prefill_pending_tokens"),
            silence=max(silences, default=None),
        )


def _sum_of_known(ranks: list[common.EngineLoad], name: str) -> int | None:
    known = [getattr(x, name) for x in ranks if x.HasField(name)]
    return _sum(known) if len(known) == len(ranks) else None


def _sum(counts: Iterable[int]) -> int | None:
    """None where one of them is no count: a worker that says such a thing has not said it."""
    known = list(counts)
    total = sum(known)
    return total if total <= _MOST and all(count >= 0 for count in known) else None


def _highest_share(shares: Iterable[float]) -> float | None:
    known = list(shares)
    return max(known) if all(isfinite(share) and share >= 0 for share in known) else None


class Load:
    """Reservations and the last report of one worker. `clock` gives seconds."""

    __slots__ = (
        "_clock",
        "_on_report",
        "_pushed",
        "_pushed_at",
        "backlog",
        "idle",
        "in_flight",
        "reported",
        "reserved_tokens",
    )

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_report: Callable[[LoadSource], None] | None = None,
    ) -> None:
        self.in_flight = 0
        self.reserved_tokens = 0
        self.reported: ReportedLoad | None = None
        self.backlog = Backlog(clock)
        self._clock = clock
        self._on_report = on_report
        self._pushed: dict[int | None, common.EngineLoad] = {}
        self._pushed_at: float | None = None
        # Set while nothing is reserved.
        self.idle = asyncio.Event()
        self.idle.set()

    # -- Reservations

    def reserve(self, tokens: int, uncached_tokens: int, *, told: bool = True) -> Place:
        """One more request of so many prompt tokens, and of those that must be computed.

        See `Backlog.reserve`.
        """
        self.in_flight += 1
        self.reserved_tokens += tokens
        self.idle.clear()
        return self.backlog.reserve(uncached_tokens, tokens, told=told)

    def give_back(self, place: Place) -> None:
        """Undoes the `reserve` that gave this place."""
        place.finish()
        self.in_flight -= 1
        self.reserved_tokens -= place.context_tokens
        if not self.in_flight:
            self.idle.set()

    # -- Reports

    def report_engine(self, load: common.EngineLoad, rank: int | None = None) -> None:
        """Takes a record that the worker pushed along with its events."""
        now = self._clock()
        if not self.pushing:
            self._pushed.clear()  # other ranks' records are from another time
        self._pushed_at = now
        if rank in self._pushed or len(self._pushed) < _MOST_RANKS:
            self._pushed[rank] = load
        self._take(ReportedLoad.of_engine(self._pushed.values(), now - load.age_ms / 1000))
        self._heard(LoadSource.PUSHED)

    def report_scheduler(self, answer: engine.GetLoadsResponse) -> None:
        """Takes the answer of GetLoads; one without any rank says nothing."""
        if answer.loads:
            self._take(ReportedLoad.of_scheduler(answer.loads, self._clock()))
            self._heard(LoadSource.POLLED)
        else:
            self.no_report(LoadSource.UNKNOWN)

    def no_report(self, why: LoadSource) -> None:
        """GetLoads gave nothing. The last report stays, and ages: unknown is not zero."""
        self._heard(why)

    @property
    def pushing(self) -> bool:
        """Whether reports come by themselves now, so that none need be asked for."""
        return self._pushed_at is not None and self._clock() - self._pushed_at < _PUSH_PATIENCE

    @property
    def silence(self) -> float:
        """Seconds for which the engine has been silent in spite of work, as far as is known."""
        report = self.reported
        if report is None or not report.silence or not self.in_flight:
            return 0.0
        # It has not spoken since the report either, or another report would be here.
        return report.silence + (self._clock() - report.at)

    def _take(self, report: ReportedLoad) -> None:
        self.reported = report
        self.backlog.reported(report.pending_tokens, report.silence)

    def _heard(self, source: LoadSource) -> None:
        if self._on_report:
            self._on_report(source)
