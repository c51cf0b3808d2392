"""The VllmEngine service of a simulated worker."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

import grpc
import numpy as np
from blake3 import blake3

from router.wire import common, engine
from router.wire.vllm_engine_pb2_grpc import VllmEngineServicer
from workers.sim import bundle
from workers.sim.engine import Engine
from workers.sim.events import EventHub
from workers.sim.faults import Trouble, Troubles, in_prompt, parse_trouble
from workers.sim.options import SimOptions
from workers.sim.refused import Refused, invalid
from workers.sim.scheduler import Scheduler
from workers.sim.stats import Stats
from workers.sim.tokenizer import EOS_IDS, SPECIAL_TOKENS, VOCAB_SIZE, plain_bytes

Context = grpc.aio.ServicerContext[Any, Any]

TROUBLE_METADATA = "sim-fault"
EMBEDDING_DIM = 64


class SimServicer(VllmEngineServicer):
    """Thin: each method reads its request, asks the engine, and words the answer."""

    def __init__(
        self,
        options: Callable[[], SimOptions],
        engine_: Engine,
        scheduler: Scheduler,
        events: EventHub,
        stats: Stats,
        troubles: Troubles,
        archive: bytes,
    ) -> None:
        self._options = options
        self._engine = engine_
        self._scheduler = scheduler
        self._events = events
        self._stats = stats
        self._troubles = troubles
        self._archive = archive
        self._started = time.monotonic()
        self._last_receive = 0.0
        self._profiling = False
        # What HealthCheck says while the engine lives.
        self.serving = False

    # ---- Generation ----

    async def Generate(self, request: engine.GenerateRequest, context: Context) -> None:
        self._stats.calls["Generate"] += 1
        self._last_receive = time.time()
        metadata = _metadata(context)
        self._stats.note(request, metadata)
        self._stats.live += 1
        try:
            trouble = self._trouble_of(request, metadata)
            await self._engine.generate(request, trouble, context.write)
            self._stats.finished += 1
        except Refused as refused:
            self._stats.refused[refused.status.name] += 1
            await _refuse(context, refused)
        except asyncio.CancelledError:
            self._stats.cancelled += 1
            raise
        finally:
            self._stats.live -= 1

    def _trouble_of(
        self, request: engine.GenerateRequest, metadata: tuple[tuple[str, str], ...]
    ) -> Trouble:
        """The call's own directive if it has one, else the rule in force."""
        try:
            for key, value in metadata:
                if key == TROUBLE_METADATA:
                    return parse_trouble(value)
            return _directive_in(request) or self._troubles.take("Generate")
        except ValueError as error:
            raise invalid(str(error)) from error

    async def Embed(self, request: engine.EmbedRequest, context: Context) -> engine.EmbedResponse:
        await self._arrive("Embed", context)
        ids = request.tokenized.input_ids
        if not ids:
            await _refuse(context, invalid("the prompt is empty"))
        seed = blake3(np.fromiter(ids, "<u4", len(ids)).tobytes())
        raw = np.frombuffer(seed.digest(length=4 * EMBEDDING_DIM), "<u4")
        vector = raw.astype(np.float64) / 2**31 - 1
        vector /= np.linalg.norm(vector)
        return engine.EmbedResponse(
            embedding=vector.tolist(), prompt_tokens=len(ids), embedding_dim=EMBEDDING_DIM
        )

    async def Abort(self, request: engine.AbortRequest, context: Context) -> engine.AbortResponse:
        await self._arrive("Abort", context)
        for request_id in request.request_ids:
            self._engine.abort(request_id)
        return engine.AbortResponse()

    # ---- What the worker is ----

    async def HealthCheck(
        self, request: engine.HealthCheckRequest, context: Context
    ) -> engine.HealthCheckResponse:
        await self._arrive("HealthCheck", context)
        if self._engine.dead is not None:
            return engine.HealthCheckResponse(
                healthy=False, message=f"The engine has died: {self._engine.dead}."
            )
        message = "" if self.serving else "not serving"
        return engine.HealthCheckResponse(healthy=self.serving, message=message)

    async def GetModelInfo(
        self, request: engine.GetModelInfoRequest, context: Context
    ) -> engine.GetModelInfoResponse:
        await self._arrive("GetModelInfo", context)
        options = self._options()
        return engine.GetModelInfoResponse(
            model_path=options.model,
            is_generation=True,
            max_context_length=options.max_context,
            vocab_size=VOCAB_SIZE,
            supports_vision=bundle.family_of(options) is not None,
            served_model_name=options.served_name,
            tokenizer_path=options.model,
            model_type=options.model_type,
            architectures=bundle.architectures(options),
            eos_token_ids=EOS_IDS,
            pad_token_id=SPECIAL_TOKENS["<|endoftext|>"],
            bos_token_id=SPECIAL_TOKENS["<|endoftext|>"],
            max_req_input_len=options.max_context - 1,
            default_sampling_params_json=json.dumps({"temperature": 0.0}),
        )

    async def GetServerInfo(
        self, request: engine.GetServerInfoRequest, context: Context
    ) -> engine.GetServerInfoResponse:
        await self._arrive("GetServerInfo", context)
        options = self._options()
        sees = bundle.family_of(options) is not None
        refers = sees and bool(options.mm_processor)
        return engine.GetServerInfoResponse(
            # The Python servicer never counts them.
            active_requests=0,
            last_receive_timestamp=self._last_receive,
            uptime_seconds=time.monotonic() - self._started,
            server_type="sim",
            kv_connector=options.kv_connector,
            kv_role=options.kv_role,
            kv_engine_id=options.kv_engine_id,
            data_parallel_size=options.data_parallel_size,
            shm_namespace_id=options.shm_namespace_id,
            kv_cache_dtype=options.kv_cache_dtype,
            block_size=options.block_size,
            attention_backend=options.attention_backend,
            model_dtype=options.model_dtype,
            pairing_protocol=options.pairing_protocol,
            mm_processor=options.mm_processor if refers else "",
            mm_media_ref_schemes=",".join(options.schemes) if refers else "",
            mm_processor_source="sim" if refers else "",
            mm_device_do_normalize=sees and options.device_normalize,
            max_num_seqs=options.max_num_seqs,
            mm_item_limits=",".join(f"{name}={limit}" for name, limit in options.item_limits)
            if sees
            else "",
            multimodal_encoder_dtype=options.encoder_dtype if sees else "",
            mm_encoder_budget=options.encoder_budget if sees else 0,
        )

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        await self._arrive("GetTokenizer", context)
        for chunk in bundle.chunks(self._archive):
            yield chunk

    # ---- Load and cache ----

    async def GetLoads(
        self, request: engine.GetLoadsRequest, context: Context
    ) -> engine.GetLoadsResponse:
        await self._arrive("GetLoads", context)
        return engine.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version="sim",
            dp_rank_count=1,
            loads=[self._scheduler.scheduler_load()],
        )

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common.KvEventBatch]:
        await self._arrive("SubscribeKvEvents", context)
        batches = self._events.subscribe(
            request.start_sequence_number,
            load_from_start=request.load_records_before_first_batch,
        )
        try:
            async for batch in batches:
                yield batch
        except Refused as refused:
            await _refuse(context, refused)
        finally:
            await batches.aclose()

    async def FlushCache(
        self, request: common.FlushCacheRequest, context: Context
    ) -> common.FlushCacheResponse:
        await self._arrive("FlushCache", context)
        await self._engine.idle(request.timeout_s)
        if self._scheduler.flush():
            return common.FlushCacheResponse(success=True, message="The cache is empty.")
        return common.FlushCacheResponse(
            success=False, message="Requests are running; nothing was flushed."
        )

    async def StartProfile(
        self, request: common.StartProfileRequest, context: Context
    ) -> common.ProfileResponse:
        await self._arrive("StartProfile", context)
        if self._profiling:
            return common.ProfileResponse(success=False, message="The profiler runs already.")
        self._profiling = True
        return common.ProfileResponse(success=True, message="The profiler runs.")

    async def StopProfile(
        self, request: common.StopProfileRequest, context: Context
    ) -> common.ProfileResponse:
        await self._arrive("StopProfile", context)
        if not self._profiling:
            return common.ProfileResponse(success=False, message="The profiler does not run.")
        self._profiling = False
        return common.ProfileResponse(success=True, message="The profiler has stopped.")

    async def _arrive(self, rpc: str, context: Context) -> None:
        """Counts a call, and lets the trouble in force befall it."""
        self._stats.calls[rpc] += 1
        trouble = self._troubles.take(rpc)
        if trouble.hang_after_chunks is not None:
            await asyncio.Event().wait()
        await asyncio.sleep(trouble.slow_first)
        if trouble.fail is not None:
            await _refuse(context, Refused(trouble.fail, "This call fails as was asked for."))


async def _refuse(context: Context, refused: Refused) -> NoReturn:
    await context.abort(refused.status, refused.message, refused.trailers)


def _metadata(context: Context) -> tuple[tuple[str, str], ...]:
    return tuple(
        (key, value if isinstance(value, str) else value.hex())
        for key, value in context.invocation_metadata() or ()
    )


def _directive_in(request: engine.GenerateRequest) -> Trouble | None:
    """`[[sim: …]]` anywhere in the prompt, as text or as tokens; ValueError when malformed."""
    if request.WhichOneof("input") == "text":
        return in_prompt(request.text.encode())
    tokenized = request.tokenized
    if "[[sim:" in tokenized.original_text:
        return in_prompt(tokenized.original_text.encode())
    ids = np.fromiter(tokenized.input_ids, np.uint32, len(tokenized.input_ids))
    return in_prompt(plain_bytes(ids))
