"""Workers without a process behind them, for decisions that only look at them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc

from router.fleet.breaker import Breaker, BreakerSettings
from router.fleet.bundle import TokenizerBundle
from router.fleet.capability import Capability
from router.fleet.endpoint import Endpoint, Role
from router.fleet.load import Load
from router.fleet.model import Model
from router.fleet.worker import Worker, WorkerState
from router.wire import engine

CAPABILITY = Capability.from_info(
    engine.GetModelInfoResponse(model_path="m", served_model_name="m"),
    engine.GetServerInfoResponse(mm_processor="inprocess", mm_device_do_normalize=True),
)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class NoChannel(grpc.aio.Channel):
    """A channel on which nobody may call."""

    def _none(self, *_: object, **__: object) -> Any:
        return None

    unary_unary = unary_stream = stream_unary = stream_stream = _none
    get_state = channel_ready = wait_for_state_change = close = _none
    __aenter__ = __aexit__ = _none


def worker(
    address: str = "127.0.0.1:1",
    *,
    state: WorkerState = WorkerState.READY,
    role: Role = Role.BOTH,
    fingerprint: str | None = None,
    clock: Callable[[], float] | None = None,
    breaker: BreakerSettings | None = None,
    known: bool = True,
    **capability: Any,
) -> Worker:
    """A worker in a state; `capability` changes fields of an ordinary one."""
    clock = clock or Clock()
    made = Worker(
        Endpoint(address, role),
        generation=1,
        channel=NoChannel(),
        breaker=Breaker(breaker or BreakerSettings(), clock),
        load=Load(clock=clock),
        clock=clock,
    )
    made.state = state
    if known:
        made.capability = replace(CAPABILITY, **capability)
    if fingerprint is not None:
        made.model = Model(TokenizerBundle({}, b"", ""), fingerprint, None)
    return made
