"""One worker: one generation of an engine at an address."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grpc

from router.fleet.breaker import Breaker, CallResult, Permit
from router.fleet.capability import Capability
from router.fleet.checked import CheckedChannel
from router.fleet.endpoint import Endpoint, Role
from router.fleet.load import Load
from router.fleet.pressure import Place, Pressure
from router.wire import ENGINE_SERVICE, engine, vllm_engine_pb2_grpc

if TYPE_CHECKING:
    from router.fleet.model import Model


# Prompt tokens per second of a worker that was not measured yet.
_ORDINARY_RATE = 5000.0
# What a token that is in flight counts of one that waits to be computed.
_CROWD = 0.01


__all__ = ["Lease", "Role", "Worker", "WorkerState"]


class WorkerState(Enum):
    """pending -> ready <-> unhealthy -> draining -> gone; only a ready one gets requests."""

    # Metadata not read yet, or not those of the worker that is expected there.
    PENDING = "pending"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    GONE = "gone"


class Outgoing:
    """A serialised request on its way out.

    A call keeps its request until its stream ends; of this one only the shell is left
    once it was sent, and not its tens of megabytes.
    """

    __slots__ = ("_wire",)

    def __init__(self, wire: bytes) -> None:
        self._wire = wire

    def take(self) -> bytes:
        """The bytes, for the one time that they are sent."""
        wire, self._wire = self._wire, b""
        return wire


class Worker:
    """A worker's address, connection, state and what is known of it.

    One object is one generation: another engine at the same address is another
    object, with its own load and breaker. `clock` gives seconds. `on_state`
    hears of every change of state, `on_learnt` when its metadata were read.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        generation: int,
        channel: grpc.aio.Channel,
        breaker: Breaker,
        load: Load,
        clock: Callable[[], float],
        on_state: Callable[[Worker], None] | None = None,
        on_learnt: Callable[[], None] | None = None,
    ) -> None:
        self.address = endpoint.address
        self.generation = generation
        self.endpoint = endpoint
        self.breaker = breaker
        self.load = load
        self.state = WorkerState.PENDING
        self.state_reason = "metadata not read yet"
        self.state_since = clock()
        self.capability: Capability | None = None
        self.model: Model | None = None
        # The worker's own answers, for clients that ask the router the same.
        self.model_info: engine.GetModelInfoResponse | None = None
        self.server_info: engine.GetServerInfoResponse | None = None
        self._clock = clock
        self._on_state = on_state
        self._on_learnt = on_learnt
        # When the worker last said anything: answered a probe or finished a call well.
        self.heard_at = self.state_since
        # Whether it was told already that this worker's prefills identify no media.
        self.told_anonymous = False
        self.connect(channel)

    def connect(self, channel: grpc.aio.Channel) -> None:
        """Makes every later call on `channel`; those that run stay where they are."""
        self.channel = channel
        self.stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(CheckedChannel(channel))
        # Raw bytes in and out: token chunks are relayed without being parsed.
        self.generate: grpc.aio.UnaryStreamMultiCallable[Outgoing, bytes] = channel.unary_stream(
            f"/{ENGINE_SERVICE}/Generate", request_serializer=Outgoing.take
        )
        self.embed: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            f"/{ENGINE_SERVICE}/Embed"
        )

    def __repr__(self) -> str:
        return f"Worker({self.address} #{self.generation} {self.state.value})"

    @property
    def role(self) -> Role:
        return self.endpoint.role

    @property
    def labels(self) -> MappingProxyType[str, str]:
        return MappingProxyType(dict(self.endpoint.labels))

    @property
    def model_name(self) -> str | None:
        """The name under which requests ask for its model; None while unknown."""
        return self.capability.served_name if self.capability else None

    @property
    def seconds_in_state(self) -> float:
        return self._clock() - self.state_since

    @property
    def expected_wait(self) -> float:
        """Seconds until a new request would start, by what lies there and how fast it goes.

        Requests that have their first output stand in nobody's way, but share
        each of its steps: of workers that are idle otherwise, the one with
        less of them comes first. A worker that was not measured yet is taken
        to be of ordinary speed.
        """
        pressure = self.pressure
        rate = pressure.rate or _ORDINARY_RATE
        return pressure.wait(_ORDINARY_RATE) + _CROWD * pressure.context_tokens / rate

    @property
    def pressure(self) -> Pressure:
        """Its work at this moment."""
        # Read anew every now and then, like all of its capability.
        self.load.backlog.slots = self.capability.max_num_seqs if self.capability else None
        return self.load.backlog.pressure()

    def silence(self) -> float:
        """Seconds since an unhealthy worker was last heard of; 0 for any other."""
        unhealthy = self.state is WorkerState.UNHEALTHY
        return self._clock() - self.heard_at if unhealthy else 0.0

    def enter(self, state: WorkerState, reason: str) -> None:
        """Changes the state; the same state with another reason only updates the reason."""
        changed = state is not self.state
        self.state_reason = reason
        if changed:
            self.state = state
            self.state_since = self._clock()
            if self._on_state:
                self._on_state(self)

    def learn(
        self,
        capability: Capability,
        model: Model | None,
        model_info: engine.GetModelInfoResponse,
        server_info: engine.GetServerInfoResponse,
    ) -> None:
        """Takes what was read of it, all at once."""
        self.capability, self.model = capability, model
        self.model_info, self.server_info = model_info, server_info
        self.heard()
        if self._on_learnt:
            self._on_learnt()

    def heard(self) -> None:
        """Notes that the worker has just said something."""
        self.heard_at = self._clock()

    def lease(
        self, tokens: int, uncached_tokens: int | None = None, *, told: bool = True
    ) -> Lease | None:
        """Reserves the load of one request; None when the breaker does not admit it.

        `tokens` is the length of its prompt, and `uncached_tokens` what of it
        must be computed, by default all. `told` is whether its first output
        tells when its prompt was done.
        """
        permit = self.breaker.acquire()
        if permit is None:
            return None
        uncached = tokens if uncached_tokens is None else uncached_tokens
        return Lease(self, self.load.reserve(tokens, uncached, told=told), permit)


class Lease:
    """One request's place at a worker: reserved load and the breaker's permit.

    Released exactly once, on the very objects it was taken from, whatever
    stands at the address by then.
    """

    __slots__ = ("_permit", "_place", "released", "worker")

    def __init__(self, worker: Worker, place: Place, permit: Permit) -> None:
        self.worker = worker
        self.released = False
        self._permit = permit
        self._place = place

    @property
    def tokens(self) -> int:
        """The length of its prompt."""
        return self._place.context_tokens

    def first_output(self) -> None:
        """The worker has begun to answer: the prompt is computed, and the worker lives."""
        self._place.first_output()
        self._permit.answered()

    def release(self, result: CallResult) -> None:
        """Gives everything back; only the first call does anything."""
        if self.released:
            return
        self.released = True
        if result is CallResult.SUCCESS:
            self.worker.heard()
        self.worker.load.give_back(self._place)
        self._permit.finish(result)
