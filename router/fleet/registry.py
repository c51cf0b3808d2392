"""Which workers exist, by address and generation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from router.fleet.breaker import Breaker, BreakerSettings, BreakerState
from router.fleet.load import Load
from router.fleet.worker import Role, Worker, WorkerState
from router.observe.logging import get_logger
from router.observe.metrics import Metrics

_log = get_logger("fleet")


@dataclass(frozen=True)
class ChannelSettings:
    """Limits of a channel to a worker; bytes and seconds."""

    max_message_bytes: int = 512 << 20
    keepalive_interval: float = 330.0

    def options(self) -> list[tuple[str, int]]:
        """gRPC channel arguments."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", int(self.keepalive_interval * 1000)),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 5_000),
            ("grpc.enable_retries", 0),
            # One connection a worker, not one shared by every channel of the process.
            ("grpc.use_local_subchannel_pool", 1),
        ]


@dataclass
class Registry:
    """The fleet. `workers` is in order of registration; gone workers are not in it."""

    metrics: Metrics
    channel_settings: ChannelSettings = field(default_factory=ChannelSettings)
    breaker_settings: BreakerSettings = field(default_factory=BreakerSettings)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._generations = itertools.count(1)
        self._listeners: list[Callable[[], None]] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, address: str) -> Worker | None:
        """The present worker at an address."""
        return self._workers.get(address)

    def add(
        self, address: str, *, role: Role = Role.BOTH, labels: Mapping[str, str] | None = None
    ) -> Worker:
        """Registers a worker, pending. Raises ValueError when the address is taken."""
        if address in self._workers:
            raise ValueError(f"{address} is registered already")
        in_flight = self.metrics.worker_in_flight.labels(address)
        worker = Worker(
            address,
            generation=next(self._generations),
            channel=grpc.aio.insecure_channel(address, options=self.channel_settings.options()),
            breaker=Breaker(
                self.breaker_settings, self.clock, lambda s: self._breaker_changed(address, s)
            ),
            load=Load(in_flight.set),
            clock=self.clock,
            role=role,
            labels=labels or {},
            on_state=self._state_changed,
        )
        self._workers[address] = worker
        self._state_changed(worker)
        return worker

    def remove(self, worker: Worker, reason: str) -> None:
        """Forgets a worker; its channel is the caller's to close."""
        if self._workers.get(worker.address) is worker:
            del self._workers[worker.address]
            worker.enter(WorkerState.GONE, reason)
            self.metrics.forget_worker(worker.address)

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change of a worker's state."""
        self._listeners.append(listener)

    @property
    def model_names(self) -> Sequence[str]:
        """The names of all models known to be served, sorted."""
        return sorted({w.model_name for w in self if w.model_name})

    def of_model(self, name: str) -> list[Worker]:
        """All registered workers of a model, healthy or not."""
        return [w for w in self if w.model_name == name]

    @property
    def routable(self) -> bool:
        """Whether any worker may get a request now."""
        return any(w.state is WorkerState.READY for w in self)

    def _state_changed(self, worker: Worker) -> None:
        for state in WorkerState:
            self.metrics.worker_state.labels(worker.address, state.value).set(worker.state is state)
        log = (
            _log.info if worker.state in (WorkerState.READY, WorkerState.PENDING) else _log.warning
        )
        log(
            "worker_state",
            worker=worker.address,
            generation=worker.generation,
            state=worker.state.value,
            reason=worker.state_reason,
            model=worker.model_name,
        )
        for listener in self._listeners:
            listener()

    def _breaker_changed(self, address: str, state: BreakerState) -> None:
        self.metrics.breaker_transitions.labels(address, state.value).inc()
        _log.warning("breaker", worker=address, state=state.value)
