"""The fleet seen as one worker: what the engine's other RPCs answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import grpc

from router.faults import Fault, Reason
from router.fleet.registry import Registry
from router.fleet.worker import Worker, WorkerState
from router.observe.logging import get_logger
from router.request.pipeline import Pipeline
from router.request.relay import being_cancelled
from router.rpc.siblings import Siblings
from router.wire import common, engine

_log = get_logger("fleet")

_CHUNK_BYTES = 1 << 20
_RPC_TIMEOUT = 5.0
_PROFILE_TIMEOUT = 60.0


class FleetView:
    """Answers for a fleet in the words of one worker.

    `schemes` are the URL schemes whose media the router can take in,
    `siblings` the other processes on the same port, if there are any.
    """

    def __init__(
        self,
        registry: Registry,
        pipeline: Pipeline,
        schemes: Sequence[str],
        siblings: Siblings | None = None,
    ) -> None:
        self._registry = registry
        self._pipeline = pipeline
        self._schemes = tuple(schemes)
        self._siblings = siblings
        self._began = time.monotonic()

    async def health(self, _: engine.HealthCheckRequest, model: str) -> engine.HealthCheckResponse:
        """Healthy when any worker may get a request."""
        if self._registry.routable:
            return engine.HealthCheckResponse(healthy=True, message="ok")
        return engine.HealthCheckResponse(healthy=False, message="no worker is ready")

    async def model_info(
        self, _: engine.GetModelInfoRequest, model: str
    ) -> engine.GetModelInfoResponse:
        """A worker's own answer; the shortest context that any worker of the model has."""
        workers = self._workers(model)
        info = engine.GetModelInfoResponse()
        info.CopyFrom(_first(w.model_info for w in workers))
        lengths = [w.model_info.max_context_length for w in workers if w.model_info]
        known = [length for length in lengths if length]
        if known:
            info.max_context_length = min(known)
        return info

    async def server_info(
        self, _: engine.GetServerInfoRequest, model: str
    ) -> engine.GetServerInfoResponse:
        """What the fleet can do, so that a gateway may take the router for a worker.

        Media references are always taken, the router being its own media
        processor. A handoff between workers is the router's business, so no
        connector is shown.
        """
        workers = self._workers(model)
        info = engine.GetServerInfoResponse()
        info.CopyFrom(_first(w.server_info for w in workers))
        for field in ("kv_connector", "kv_role", "kv_engine_id", "shm_namespace_id"):
            info.ClearField(field)
        info.active_requests = sum(w.load.in_flight for w in workers)
        info.is_paused = False
        info.uptime_seconds = time.monotonic() - self._began
        info.data_parallel_size = 1
        info.max_num_seqs = _sum_if_all_known([c.max_num_seqs for c in _capabilities(workers)])
        if any(w.model and w.model.spec for w in workers):
            info.mm_processor = "router"
            info.mm_processor_source = "default"
            info.mm_media_ref_schemes = ",".join(self._schemes)
            info.mm_item_limits = _widest_item_limits(workers)
            budgets = [c.encoder_budget for c in _capabilities(workers)]
            info.mm_encoder_budget = (
                max((b or 0 for b in budgets), default=0) if all(budgets) else 0
            )
        else:
            for field in ("mm_processor", "mm_processor_source", "mm_media_ref_schemes"):
                info.ClearField(field)
        wanted = Counter(c.device_normalize for c in _capabilities(workers))
        info.mm_device_do_normalize = wanted.most_common(1)[0][0]
        return info

    def tokenizer_chunks(self, model: str) -> Iterator[common.GetTokenizerChunk]:
        """The archive as a worker gave it. Raises `Fault`."""
        loaded = _first(w.model for w in self._workers(model))
        archive, sha256 = loaded.bundle.archive, loaded.bundle.sha256
        return _chunks(archive, sha256)

    async def loads(self, request: engine.GetLoadsRequest, model: str) -> engine.GetLoadsResponse:
        """One entry a worker, numbered in order of registration.

        A worker that does not answer is shown with what the router knows of
        it: the requests that it has there.
        """
        workers = list(self._registry)
        entries = await asyncio.gather(*(_load_of(w, i) for i, w in enumerate(workers)))
        if request.HasField("dp_rank"):
            entries = [e for e in entries if e.dp_rank == request.dp_rank]
        return engine.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version="mmrouter",
            dp_rank_count=len(workers),
            loads=entries,
        )

    async def abort(self, request: engine.AbortRequest, model: str) -> engine.AbortResponse:
        """Ends the requests with these ids at whichever worker they run; unknown ids are fine."""
        everywhere = [self.abort_here(request)]
        if self._siblings is not None:
            everywhere.append(self._siblings.abort(request))
        await asyncio.gather(*everywhere)
        return engine.AbortResponse()

    async def abort_here(self, request: engine.AbortRequest) -> None:
        """Ends those of the requests that this process has."""
        here = self._pipeline.active.ids().intersection(request.request_ids)
        await asyncio.gather(*(self._pipeline.abort(request_id) for request_id in here))

    async def flush_cache(
        self, request: common.FlushCacheRequest, model: str
    ) -> common.FlushCacheResponse:
        """Flushes every worker; succeeds when all did."""
        timeout = _RPC_TIMEOUT + request.timeout_s
        failed = await self._on_all(lambda w: w.stub.FlushCache(request, timeout=timeout))
        return common.FlushCacheResponse(success=not failed, message="; ".join(failed))

    async def start_profile(
        self, request: common.StartProfileRequest, model: str
    ) -> common.ProfileResponse:
        """Starts the profiler of every worker."""
        failed = await self._on_all(
            lambda w: w.stub.StartProfile(request, timeout=_PROFILE_TIMEOUT)
        )
        return common.ProfileResponse(success=not failed, message="; ".join(failed))

    async def stop_profile(
        self, request: common.StopProfileRequest, model: str
    ) -> common.ProfileResponse:
        """Stops the profiler of every worker."""
        failed = await self._on_all(lambda w: w.stub.StopProfile(request, timeout=_PROFILE_TIMEOUT))
        return common.ProfileResponse(success=not failed, message="; ".join(failed))

    async def _on_all(self, call: Callable[[Worker], Awaitable[Any]]) -> list[str]:
        workers = list(self._registry)
        if not workers:
            return ["no worker is registered"]
        answers = await asyncio.gather(*(call(w) for w in workers), return_exceptions=True)
        failed = []
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                failed.append(f"{worker.address}: {answer.code().name}")
            elif isinstance(answer, asyncio.CancelledError):
                # Its channel was closed under the call; were it us, gather had raised.
                failed.append(f"{worker.address}: removed")
            elif isinstance(answer, BaseException):
                raise answer
            elif not answer.success:
                failed.append(f"{worker.address}: {answer.message}")
        return failed

    def _workers(self, model: str) -> list[Worker]:
        """The model's workers whose metadata are known, ready ones first. Raises `Fault`."""
        workers = self._registry.of_model(self._pipeline.decider.model_name(model))
        return sorted(workers, key=lambda w: w.state is not WorkerState.READY)


def _first(values: Any) -> Any:
    for value in values:
        if value is not None:
            return value
    raise Fault(Reason.NO_AVAILABLE_WORKER, "no worker's metadata have been read yet")


def _capabilities(workers: Sequence[Worker]) -> list[Any]:
    return [w.capability for w in workers if w.capability is not None]


def _sum_if_all_known(values: Sequence[int | None]) -> int:
    return min(sum(v for v in values if v), _INT32) if values and all(values) else 0


def _widest_item_limits(workers: Sequence[Worker]) -> str:
    """What at least one worker takes; the constraint finds that worker.

    A modality that any worker leaves out has no limit.
    """
    limits = [capability.item_limits for capability in _capabilities(workers)]
    named = sorted(set[str]().union(*limits))
    return ",".join(
        f"{modality}={max(each[modality] for each in limits)}"
        for modality in named
        if all(modality in each for each in limits)
    )


def _chunks(archive: bytes, sha256: str) -> Iterator[common.GetTokenizerChunk]:
    for start in range(0, len(archive), _CHUNK_BYTES):
        last = start + _CHUNK_BYTES >= len(archive)
        yield common.GetTokenizerChunk(
            data=archive[start : start + _CHUNK_BYTES], sha256=sha256 if last else ""
        )


async def _load_of(worker: Worker, position: int) -> engine.SchedulerLoad:
    try:
        answer = await worker.stub.GetLoads(engine.GetLoadsRequest(), timeout=_RPC_TIMEOUT)
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        if being_cancelled():
            raise
        _log.debug("load_unknown", worker=worker.address, why=type(error).__name__)
        return engine.SchedulerLoad(
            dp_rank=position,
            num_running_reqs=worker.load.in_flight,
            num_total_reqs=worker.load.in_flight,
        )
    return _merged(answer.loads, position)


# The most that a field holds; a worker may have said anything.
_INT32 = 2**31 - 1
_SUMMED = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_total_reqs",
    "num_used_tokens",
    "max_total_num_tokens",
    "gen_throughput",
    "max_running_requests",
    "num_waiting_uncached_tokens",
)
_AVERAGED = ("token_usage", "cache_hit_rate", "utilization")


def _merged(ranks: Sequence[engine.SchedulerLoad], position: int) -> engine.SchedulerLoad:
    merged = engine.SchedulerLoad(dp_rank=position)
    for name in _SUMMED:
        total = sum(getattr(rank, name) for rank in ranks)
        setattr(merged, name, max(-_INT32, min(total, _INT32)) if isinstance(total, int) else total)
    for name in _AVERAGED:
        setattr(merged, name, sum(getattr(rank, name) for rank in ranks) / max(1, len(ranks)))
    return merged
