"""Which workers exist, by address and generation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from router.fleet.breaker import Breaker, BreakerSettings, BreakerState
from router.fleet.channel import ChannelSettings
from router.fleet.endpoint import Endpoint
from router.fleet.gauges import worker_gauges
from router.fleet.load import Load, LoadSource
from router.fleet.worker import Worker, WorkerState
from router.observe.logging import get_logger
from router.observe.metrics import Metrics

_log = get_logger("fleet")


@dataclass
class Registry:
    """The fleet, in order of registration; gone workers are not in it.

    At an address stands one worker, and beside it those that stood there before
    and still finish what they have.
    """

    metrics: Metrics
    channel_settings: ChannelSettings = field(default_factory=ChannelSettings)
    breaker_settings: BreakerSettings = field(default_factory=BreakerSettings)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._workers: dict[Worker, None] = {}
        self._at: dict[str, Worker] = {}
        self._generations = itertools.count(1)
        self._listeners: list[Callable[[], None]] = []
        self._by_model: dict[str, tuple[Worker, ...]] | None = None
        self._unreadable = 0
        self.metrics.show(worker_gauges(self))

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, address: str) -> Worker | None:
        """The present worker at an address."""
        return self._at.get(address)

    def add(self, endpoint: Endpoint) -> Worker:
        """Registers a worker, pending.

        One that drains at the address makes room. Raises ValueError when
        another one stands there.
        """
        address = endpoint.address
        present = self._at.get(address)
        if present is not None and present.state is not WorkerState.DRAINING:
            raise ValueError(f"{address} is registered already")
        if present is not None:
            self.metrics.forget_worker(address)
        worker = Worker(
            endpoint,
            generation=next(self._generations),
            channel=self.open_channel(address),
            breaker=Breaker(
                self.breaker_settings, self.clock, lambda s: self._breaker_changed(worker, s)
            ),
            load=Load(
                clock=self.clock, on_report=lambda source: self._load_reported(worker, source)
            ),
            clock=self.clock,
            on_state=self._state_changed,
            on_learnt=self._changed,
        )
        self._workers[worker] = None
        self._at[address] = worker
        self._state_changed(worker)
        return worker

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """A connection to a worker; the caller closes it."""
        return self.channel_settings.open(address)

    def remove(self, worker: Worker, reason: str) -> None:
        """Forgets a worker; its channel is the caller's to close."""
        if worker not in self._workers:
            return
        del self._workers[worker]
        worker.enter(WorkerState.GONE, reason)
        if self._stands(worker):
            del self._at[worker.address]
            self._changed()
            self.metrics.forget_worker(worker.address)

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change of a worker's state."""
        self._listeners.append(listener)

    @property
    def standing(self) -> Sequence[Worker]:
        """The present worker of each address."""
        return list(self._at.values())

    @property
    def model_names(self) -> Sequence[str]:
        """The names of all models known to be served, sorted."""
        return tuple(self._models())

    def of_model(self, name: str) -> Sequence[Worker]:
        """The present workers of a model, healthy or not.

        The same object until any worker comes, goes, or is read anew.
        """
        return self._models().get(name, ())

    @property
    def unreadable(self) -> int:
        """How many workers have not said yet which model they serve."""
        self._models()
        return self._unreadable

    def _models(self) -> dict[str, tuple[Worker, ...]]:
        # Asked several times a request, of fleets that change once in a while.
        if self._by_model is None:
            found: dict[str, list[Worker]] = {}
            for worker in self._at.values():
                if worker.model_name:
                    found.setdefault(worker.model_name, []).append(worker)
            self._by_model = {name: tuple(found[name]) for name in sorted(found)}
            self._unreadable = sum(worker.capability is None for worker in self._workers)
        return self._by_model

    @property
    def routable(self) -> bool:
        """Whether any worker may get a request now."""
        return any(w.state is WorkerState.READY for w in self)

    def routable_for(self, model: str) -> bool:
        """Whether any worker of a model, named as served or by its path, may get a request now."""
        return any(
            w.state is WorkerState.READY
            and w.capability is not None
            and model in (w.capability.served_name, w.capability.model_path)
            for w in self
        )

    def _stands(self, worker: Worker) -> bool:
        # Metrics are by address: those of a worker that only finishes are no longer shown.
        return self._at.get(worker.address) is worker

    def _state_changed(self, worker: Worker) -> None:
        log = _log.warning if worker.state is WorkerState.UNHEALTHY else _log.info
        log(
            "worker_state",
            worker=worker.address,
            generation=worker.generation,
            state=worker.state.value,
            reason=worker.state_reason,
            model=worker.model_name,
        )
        self._changed()
        for listener in self._listeners:
            listener()

    def _changed(self) -> None:
        self._by_model = None

    def _load_reported(self, worker: Worker, source: LoadSource) -> None:
        if self._stands(worker):
            self.metrics.load_reports.labels(worker.address, source.value).inc()

    def _breaker_changed(self, worker: Worker, state: BreakerState) -> None:
        if self._stands(worker):
            self.metrics.breaker_transitions.labels(worker.address, state.value).inc()
        _log.warning("breaker", worker=worker.address, state=state.value)
