"""Small servers that a command under test can talk to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from router.wire import common, engine
from router.wire.router_pb2_grpc import RouterAdminServicer, add_RouterAdminServicer_to_server
from router.wire.vllm_engine_pb2_grpc import VllmEngineServicer, add_VllmEngineServicer_to_server
from workers.sim.bundle import chunks, model_files, pack
from workers.sim.options import SimOptions


def archive() -> bytes:
    """The tokenizer bundle of a simulated vision model: bytes are tokens, Qwen's specials."""
    return pack(model_files(SimOptions()))


@dataclass(frozen=True)
class Failure:
    """A rich error as the router sends it."""

    code: grpc.StatusCode
    reason: str
    message: str
    retry_after: float | None = None

    def abort(self, context: grpc.ServicerContext) -> None:
        details = [error_details_pb2.ErrorInfo(reason=self.reason, domain="mmrouter")]
        packed = [any_pb2.Any() for _ in details]
        packed[0].Pack(details[0])
        if self.retry_after is not None:
            delay = Duration()
            delay.FromMilliseconds(int(self.retry_after * 1000))
            packed.append(any_pb2.Any())
            packed[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=self.code.value[0], message=self.message, details=packed)
        context.abort_with_status(rpc_status.to_status(status))


@dataclass
class Engine(VllmEngineServicer):
    """Answers Generate with what it was given and keeps the requests."""

    responses: Sequence[engine.GenerateResponse] = ()
    failure: Failure | None = None
    trailers: Sequence[tuple[str, str]] = ()
    bundle: bytes = field(default_factory=archive)
    sha256: str | None = None
    requests: list[engine.GenerateRequest] = field(default_factory=list)
    # The models that the calls for information asked about.
    asked: list[str | bytes] = field(default_factory=list)
    # What the calls carried as their authorization.
    authorization: list[str | bytes] = field(default_factory=list)

    def GetModelInfo(
        self, request: engine.GetModelInfoRequest, context: grpc.ServicerContext
    ) -> engine.GetModelInfoResponse:
        self._note(context)
        return engine.GetModelInfoResponse(served_model_name="served", model_path="path")

    def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: grpc.ServicerContext
    ) -> Iterator[common.GetTokenizerChunk]:
        self._note(context)
        for chunk in chunks(self.bundle, 1000):
            if self.sha256 is not None and chunk.sha256:
                chunk.sha256 = self.sha256
            yield chunk

    def Generate(
        self, request: engine.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[engine.GenerateResponse]:
        self.requests.append(request)
        self.authorization.append(_header(context, "authorization"))
        yield from self.responses
        context.set_trailing_metadata(tuple(self.trailers))
        if self.failure is not None:
            self.failure.abort(context)

    def _note(self, context: grpc.ServicerContext) -> None:
        self.asked.append(_header(context, "x-model"))
        self.authorization.append(_header(context, "authorization"))


@dataclass
class Admin(RouterAdminServicer):
    """Answers every admin call with `answer` and keeps the requests."""

    answer: Any
    requests: list[Any] = field(default_factory=list)
    authorization: list[str | bytes] = field(default_factory=list)

    def _answer(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        self.authorization.append(_header(context, "authorization"))
        return self.answer

    ListWorkers = AddWorker = DrainWorker = RemoveWorker = Explain = SetLogLevel = _answer


def _header(context: grpc.ServicerContext, key: str) -> str | bytes:
    return dict(context.invocation_metadata()).get(key, "")


@contextmanager
def serving(
    *servicers: Engine | Admin,
    listen: str = "127.0.0.1:0",
    credentials: grpc.ServerCredentials | None = None,
) -> Iterator[str]:
    """Serves the servicers, by default on a free port of this machine; yields the address."""
    server = grpc.server(ThreadPoolExecutor(2))
    for servicer in servicers:
        if isinstance(servicer, Engine):
            add_VllmEngineServicer_to_server(servicer, server)
        else:
            add_RouterAdminServicer_to_server(servicer, server)
    if credentials:
        port = server.add_secure_port(listen, credentials)
    else:
        port = server.add_insecure_port(listen)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


def chunk(text: bytes | Sequence[int], index: int = 0) -> engine.GenerateResponse:
    """A stream chunk; bytes are their own token ids."""
    return engine.GenerateResponse(
        chunk=engine.GenerateStreamChunk(token_ids=list(text), index=index)
    )


def complete(
    ids: bytes | Sequence[int], index: int = 0, finish_reason: str = "stop"
) -> engine.GenerateResponse:
    """The end of a choice."""
    return engine.GenerateResponse(
        complete=engine.GenerateComplete(
            output_ids=list(ids), index=index, finish_reason=finish_reason, prompt_tokens=7
        )
    )
