"""Each worker's place in the index of its model, and the stream of events that fills it.

Made for workers of models whose policy scores prefixes, and for nobody else. A
worker that goes, or is replaced at its address, takes its blocks, its stream
and the stream's count with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import cast

import grpc

from router.fleet.registry import Registry
from router.fleet.role import effective_role
from router.fleet.worker import Role, Worker, WorkerState
from router.observe.logging import get_logger
from router.policy.base import Candidate
from router.policy.models import Policies
from router.prefix.events import EventReader
from router.prefix.index import PrefixIndex
from router.prefix.learn import Learner, References, Watch
from router.prefix.names import Learned
from router.prefix.resident import Resident
from router.prefix.subscription import StreamEnded, Subscription
from router.request.relay import being_cancelled
from router.wire import common

_log = get_logger("prefix")

# vLLM's own default, for workers that do not say.
_ORDINARY_BLOCK = 16
# Seconds after which a stream that failed for a reason of ours is followed again.
_REPAIR_PAUSE = 1.0
_LEAVING = frozenset({WorkerState.DRAINING, WorkerState.GONE})


class Residents:
    """Who holds what, of the whole fleet. Nothing happens before `start`.

    `reread_interval` is how often, in seconds, it is seen whether a worker
    without events was read anew, and so may have some. `on_lag` hears how many
    seconds after a worker's change the index has it.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        reread_interval: float,
        on_lag: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._registry = registry
        self._reread_interval = reread_interval
        self._on_lag = on_lag
        self._policies: Policies | None = None
        self._indexes: dict[str, PrefixIndex] = {}
        self._learners: dict[str, Learner] = {}
        self._residents: dict[Worker, Resident] = {}
        self._streams: dict[Worker, tuple[Subscription, asyncio.Task[None]]] = {}

    def start(self, policies: Policies) -> None:
        """Follows the fleet from now on; the loops of the index are compiled by then."""
        self._policies = policies
        self._registry.listen(self._follow_fleet)
        self._follow_fleet()

    async def close(self) -> None:
        """Ends every stream."""
        self._policies = None
        tasks = [task for _, task in self._streams.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._streams.clear()

    def of(self, candidate: Candidate) -> Resident | None:
        """A worker's place in its model's index, made at the first question."""
        worker = cast("Worker", candidate)
        found = self._residents.get(worker)
        if found is not None or self._policies is None:
            return found
        if worker.capability is None or worker.state in _LEAVING:
            return None
        name = worker.capability.served_name
        if name not in self._indexes:
            self._indexes[name] = PrefixIndex(clock=self._registry.clock)
            self._learners[name] = Learner(self._registry.clock)
        block_size = worker.capability.block_size or _ORDINARY_BLOCK
        resident = Resident(self._indexes[name], block_size, self._learners[name])
        self._residents[worker] = resident
        return resident

    def learned(self, model: str, name: str) -> Learned | None:
        """What the model's workers call an item that the router calls `name`, if it is known."""
        learner = self._learners.get(model)
        return learner.known(name) if learner is not None else None

    def watch(self, worker: Worker, references: References) -> Watch | None:
        """Follows what the worker reports of these references, if it reports at all."""
        resident = self._residents.get(worker)
        return resident.watch(references) if resident is not None else None

    def learners(self) -> Iterable[tuple[str, Learner]]:
        """What was learned of each model's media, by the model's name."""
        for learner in self._learners.values():
            learner.settle()
        return self._learners.items()

    def indexes(self) -> Iterable[tuple[str, PrefixIndex]]:
        """Each model's index, by the model's name."""
        return self._indexes.items()

    def readers(self) -> Iterable[tuple[str, EventReader]]:
        """The state of each worker's stream, by the worker's address."""
        return [(worker.address, stream.reader) for worker, (stream, _) in self._streams.items()]

    def _follow_fleet(self) -> None:
        if self._policies is None:
            return
        staying = {w for w in self._registry if w.state not in _LEAVING}
        for worker in self._residents.keys() - staying:
            self._residents.pop(worker).leave()
        for worker in self._streams.keys() - staying:
            self._streams.pop(worker)[1].cancel()
        for worker in staying - self._streams.keys():
            if self._wants_events(worker, self._policies):
                self._subscribe(worker)

    def _wants_events(self, worker: Worker, policies: Policies) -> bool:
        name = worker.model_name
        if name is None or worker.state is WorkerState.PENDING:
            return False
        # A decode leg computes no prompt, so what is cached there saves nothing.
        credit = 0.0 if effective_role(worker) in (Role.DECODE, Role.ENCODE) else None
        return policies.uses_prefix_overlap(name, prefix_credit=credit)

    def _subscribe(self, worker: Worker) -> None:
        resident = self.of(worker)
        assert resident is not None, "its metadata were read"
        stream = Subscription(
            worker.address,
            resident,
            lambda: events_of(worker, self._on_lag),
            lambda rank, load: worker.load.report_engine(load, rank),
        )
        task = asyncio.create_task(self._follow(worker, stream), name=f"events of {worker.address}")
        self._streams[worker] = stream, task

    async def _follow(self, worker: Worker, stream: Subscription) -> None:
        while True:
            reading = worker.server_info
            try:
                await stream.run()
                # It has no events, as long as it is what it was.
                while worker.server_info is reading:  # noqa: ASYNC110 - readings tell nobody
                    await asyncio.sleep(self._reread_interval)
            except Exception as error:
                # What is known stays as it is; the stream's numbers tell whether it is still true.
                _log.error("events_failed", worker=worker.address, exc_info=error)
                await asyncio.sleep(_REPAIR_PAUSE)


async def events_of(
    worker: Worker, on_lag: Callable[[float], None]
) -> AsyncGenerator[common.KvEventBatch, None]:
    """A worker's batches from now on, its load first. Raises `StreamEnded`."""
    call = worker.stub.SubscribeKvEvents(
        common.SubscribeKvEventsRequest(
            start_sequence_number=0, load_records_before_first_batch=True
        )
    )
    try:
        async for batch in call:
            yield batch
            # It was taken in by now. The clock is another machine's, and may be ahead.
            if batch.events and batch.timestamp:
                on_lag(max(0.0, time.time() - batch.timestamp))
    except grpc.aio.AioRpcError as error:
        raise StreamEnded(error.code().name, error.details() or "") from None
    except (asyncio.CancelledError, grpc.aio.UsageError):
        # What grpc says of a channel that was closed, as when credentials are renewed.
        if being_cancelled():
            raise
        raise StreamEnded("CANCELLED", "its connection was closed") from None
    finally:
        call.cancel()
