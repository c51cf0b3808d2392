"""`vllm.grpc.engine.VllmEngine` as the router serves it.

Thin: parse, call the pipeline, turn faults into statuses, count the outcome.
Generate's responses are the worker's own bytes.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from router.faults import Fault, Reason
from router.observe.logging import get_logger
from router.observe.metrics import Metrics
from router.request.pipeline import Pipeline, Record
from router.request.relay import ClientGone, Write
from router.rpc.errors import wire_error
from router.rpc.fleet_view import FleetView
from router.wire import ENGINE_SERVICE, common, engine

_log = get_logger("request")

Context = grpc.aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)


class EngineService:
    """The engine's RPCs, in front of a fleet."""

    def __init__(self, pipeline: Pipeline, view: FleetView, metrics: Metrics) -> None:
        self._pipeline = pipeline
        self._view = view
        self._metrics = metrics

    def handlers(self) -> grpc.GenericRpcHandler:
        """Handlers over raw bytes; parsing is ours, so that a failure has a reason."""
        unary = grpc.unary_unary_rpc_method_handler
        streaming = grpc.unary_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            ENGINE_SERVICE,
            {
                "Generate": streaming(self.generate),
                "Embed": unary(self.embed),
                "HealthCheck": unary(self._answer(engine.HealthCheckRequest, self._view.health)),
                "FlushCache": unary(self._answer(common.FlushCacheRequest, self._view.flush_cache)),
                "StartProfile": unary(
                    self._answer(common.StartProfileRequest, self._view.start_profile)
                ),
                "StopProfile": unary(
                    self._answer(common.StopProfileRequest, self._view.stop_profile)
                ),
                "Abort": unary(self._answer(engine.AbortRequest, self._view.abort)),
                "GetModelInfo": unary(
                    self._answer(engine.GetModelInfoRequest, self._view.model_info)
                ),
                "GetServerInfo": unary(
                    self._answer(engine.GetServerInfoRequest, self._view.server_info)
                ),
                "GetLoads": unary(self._answer(engine.GetLoadsRequest, self._view.loads)),
                "GetTokenizer": streaming(self.get_tokenizer),
                "SubscribeKvEvents": streaming(self.subscribe_kv_events),
            },
        )

    async def generate(self, raw: bytes, context: Context) -> None:
        """Generate: the worker's own messages, one after the other."""
        async with self._counted(context) as record:
            request = _parse(engine.GenerateRequest, raw)
            del raw
            record.request_id = request.request_id or uuid.uuid4().hex
            await self._pipeline.generate(
                request,
                model=_asked_model(context),
                time_left=context.time_remaining(),
                write=_writer(context),
                record=record,
            )

    async def embed(self, raw: bytes, context: Context) -> bytes:
        """Embed: one worker's answer as it came."""
        async with self._counted(context) as record:
            request = _parse(engine.EmbedRequest, raw)
            record.request_id = request.request_id or uuid.uuid4().hex
            return await self._pipeline.embed(
                request,
                model=_asked_model(context),
                time_left=context.time_remaining(),
                record=record,
            )

    @asynccontextmanager
    async def _counted(self, context: Context) -> AsyncIterator[Record]:
        """One request: exactly one outcome, counted when it ends, however it ends."""
        began = time.monotonic()
        record = Record(request_id="")
        self._metrics.in_flight.inc()
        outcome, reason = "internal", "internal"
        try:
            yield record
            outcome, reason = "ok", ""
            context.set_trailing_metadata(_trailers(record))
        except asyncio.CancelledError:
            outcome, reason = "client_cancelled", ""
            raise
        except ClientGone:
            outcome, reason = "client_cancelled", ""
        except Exception as error:
            failed = wire_error(self._fault(error, record))
            outcome, reason = failed.outcome, failed.reason
            await context.abort(failed.code, failed.message, failed.trailers + _trailers(record))
        finally:
            self._metrics.in_flight.dec()
            self._finish(record, outcome, reason, time.monotonic() - began)

    async def get_tokenizer(self, raw: bytes, context: Context) -> AsyncIterator[bytes]:
        """GetTokenizer: the archive of the model that is asked for."""
        try:
            chunks = self._view.tokenizer_chunks(_asked_model(context))
        except Exception as error:
            await _abort(context, self._fault(error, None))
        for chunk in chunks:
            yield chunk.SerializeToString()

    async def subscribe_kv_events(self, raw: bytes, context: Context) -> None:
        """SubscribeKvEvents: a fleet has no one sequence of events to serve."""
        await _abort(
            context,
            Fault(
                Reason.UNIMPLEMENTED,
                "KV events are of one worker; subscribe to the workers themselves",
            ),
        )

    def _answer(
        self, kind: type[M], serve: Callable[[M, str], Awaitable[Message]]
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def handler(raw: bytes, context: Context) -> bytes:
            try:
                answer = await serve(_parse(kind, raw), _asked_model(context))
            except Exception as error:
                await _abort(context, self._fault(error, None))
            return answer.SerializeToString()

        return handler

    def _fault(self, error: Exception, record: Record | None) -> Fault:
        if isinstance(error, Fault):
            return error
        _log.error("internal_error", request=record.request_id if record else "", exc_info=error)
        return Fault(Reason.INTERNAL, "the router failed internally; its log has the request id")

    def _finish(self, record: Record, outcome: str, reason: str, seconds: float) -> None:
        progress = record.journey.progress
        # Both clocks are the monotonic one, so a moment can be told as an age.
        first = progress.first_output_at
        to_first = None if first is None else seconds - (time.monotonic() - first)
        self._observe(record, outcome, reason, seconds, to_first)
        resolution = record.resolution
        told = {
            "mode": resolution.mode.value if resolution else None,
            "mode_reason": resolution.why.value if resolution else None,
            "worker": record.journey.worker or None,
            "reason": reason or None,
            "first_output_seconds": None if to_first is None else round(to_first, 4),
            "finish": ",".join(progress.finish_reasons) or None,
        }
        _log.info(
            "request",
            request=record.request_id[:128],
            model=record.model,
            outcome=outcome,
            attempts=record.journey.attempts,
            seconds=round(seconds, 4),
            prompt_tokens=progress.prompt_tokens or record.prompt_tokens,
            cached_tokens=progress.cached_tokens,
            output_tokens=progress.output_tokens,
            **{key: value for key, value in told.items() if value is not None},
        )

    def _observe(
        self, record: Record, outcome: str, reason: str, seconds: float, to_first: float | None
    ) -> None:
        metrics, model, progress = self._metrics, record.model, record.journey.progress
        metrics.requests.labels(model, outcome, reason).inc()
        metrics.duration.labels(model).observe(seconds)
        if reason == "overloaded":
            metrics.sheds.labels(model).inc()
        if to_first is None:
            return
        metrics.first_output.labels(model).observe(to_first)
        metrics.relayed_messages.inc(progress.messages)
        metrics.relayed_bytes.inc(progress.nbytes)
        metrics.prompt_tokens.labels(model).inc(progress.prompt_tokens)
        metrics.cached_tokens.labels(model).inc(progress.cached_tokens)
        tokens = progress.output_tokens
        metrics.output_tokens.labels(model).inc(tokens)
        if progress.messages > 1 and tokens > 1 and progress.first_output_at is not None:
            streamed = progress.last_at - progress.first_output_at
            metrics.token_time.labels(model).observe(streamed / (tokens - 1))


def _parse(kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise Fault(
            Reason.INVALID_REQUEST, f"the message is not a {kind.DESCRIPTOR.full_name}"
        ) from None


def _writer(context: Context) -> Write:
    async def write(message: bytes) -> None:
        try:
            await context.write(message)
        except grpc.aio.InternalError as error:
            # A write that waits for the client's window fails when the client leaves.
            raise ClientGone from error

    return write


def _asked_model(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "x-model":
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""


def _trailers(record: Record) -> tuple[tuple[str, str], ...]:
    """Where the request went, for people and tests; ASCII only, as gRPC demands."""
    trailers = [("mmrouter-request-id", record.request_id)]
    if record.resolution is not None:
        trailers.append(("mmrouter-mode", record.resolution.mode.value))
        trailers.append(("mmrouter-reason", record.resolution.why.value))
    if record.journey.attempts:
        trailers.append(("mmrouter-worker", record.journey.worker))
        trailers.append(("mmrouter-attempts", str(record.journey.attempts)))
    return tuple((key, _ascii(value)) for key, value in trailers)


def _ascii(text: str) -> str:
    if text.isascii() and text.isprintable() and len(text) <= 256:
        return text
    return "".join(c if " " <= c <= "~" else "?" for c in text[:256])


async def _abort(context: Context, fault: Fault) -> None:
    failed = wire_error(fault)
    await context.abort(failed.code, failed.message, failed.trailers)
