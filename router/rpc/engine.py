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
from router.observe.logging import bind_request, bind_trace, get_logger
from router.request.active import Aborted
from router.request.pipeline import Pipeline
from router.request.record import Record
from router.request.relay import ClientGone
from router.rpc.account import CANCELLED, OK, TOO_LATE, UNKNOWN, Accounts, Ending
from router.rpc.errors import internal, wire_error
from router.rpc.fleet_view import FleetView
from router.wire import ENGINE_SERVICE, common, engine

_log = get_logger("request")

Context = grpc.aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)

# Seconds; timers on both sides of a deadline fire within this.
_NO_TIME = 0.02


class EngineService:
    """The engine's RPCs, in front of a fleet."""

    def __init__(self, pipeline: Pipeline, view: FleetView, accounts: Accounts) -> None:
        self._pipeline = pipeline
        self._view = view
        self._accounts = accounts

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
        async with self._counted("Generate", context) as record:
            request = _parse(engine.GenerateRequest, raw)
            record.nbytes = len(raw)
            del raw
            record.request_id = request.request_id or uuid.uuid4().hex
            bind_request(record.request_id)
            await self._pipeline.generate(
                request,
                model=_asked_model(context),
                time_left=context.time_remaining(),
                write=context.write,
                record=record,
            )

    async def embed(self, raw: bytes, context: Context) -> bytes:
        """Embed: one worker's answer as it came."""
        async with self._counted("Embed", context) as record:
            request = _parse(engine.EmbedRequest, raw)
            record.request_id = request.request_id or uuid.uuid4().hex
            bind_request(record.request_id)
            return await self._pipeline.embed(
                request,
                model=_asked_model(context),
                time_left=context.time_remaining(),
                record=record,
            )

    @asynccontextmanager
    async def _counted(self, method: str, context: Context) -> AsyncIterator[Record]:
        """One request: exactly one outcome, counted when it ends, however it ends."""
        began = time.monotonic()
        record, ending, accounts = Record(request_id=""), UNKNOWN, self._accounts
        accounts.metrics.in_flight.inc()
        name = f"{ENGINE_SERVICE}/{method}"
        with accounts.tracing.server(name, context.invocation_metadata) as span:
            if span.trace_id:
                bind_trace(span.trace_id)
            try:
                yield record
                ending = OK
                context.set_trailing_metadata(_trailers(record))
            except asyncio.CancelledError:
                ending = TOO_LATE if _deadline_passed(context) else CANCELLED
                raise
            except ClientGone:
                ending = CANCELLED
            except Aborted:
                # Of an Embed, whose answer has no way to say so.
                ending = CANCELLED
                await context.abort(
                    grpc.StatusCode.CANCELLED, "the request was aborted", _trailers(record)
                )
            except Exception as error:
                failed = wire_error(self._fault(error))
                ending = Ending(failed.outcome, failed.reason, failed.code.name, failed.message)
                unread = record.journey.progress.writing
                if failed.code is grpc.StatusCode.DEADLINE_EXCEEDED and (
                    unread or _deadline_passed(context)
                ):
                    # The client's own limit, whoever was first to notice it; or it has read
                    # so slowly that its request's time was over, which is no worker's fault.
                    ending = TOO_LATE
                await context.abort(
                    failed.code, failed.message, failed.trailers + _trailers(record)
                )
            finally:
                accounts.metrics.in_flight.dec()
                accounts.close(record, ending, time.monotonic() - began, span)

    async def get_tokenizer(self, raw: bytes, context: Context) -> AsyncIterator[bytes]:
        """GetTokenizer: the archive of the model that is asked for."""
        try:
            chunks = self._view.tokenizer_chunks(_asked_model(context))
        except Exception as error:
            await _abort(context, self._fault(error))
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
                await _abort(context, self._fault(error))
            return answer.SerializeToString()

        return handler

    def _fault(self, error: Exception) -> Fault:
        if isinstance(error, Fault):
            return error
        return internal(_log, error)


def _parse(kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise Fault(
            Reason.INVALID_REQUEST, f"the message is not a {kind.DESCRIPTOR.full_name}"
        ) from None


def _deadline_passed(context: Context) -> bool:
    """Whether the client's deadline is over, or will be before it could hear of anything else."""
    left = context.time_remaining()
    return left is not None and left <= _NO_TIME


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
    if record.override_ignored:
        trailers.append(("mmrouter-ignored", "mm_processing"))
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
