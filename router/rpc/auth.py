"""Bearer tokens: who may call which service."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from router.faults import Fault, Reason
from router.observe.logging import get_logger
from router.rpc.errors import wire_error

_log = get_logger("auth")

# What a client can send behind `Bearer`.
_TOKEN = re.compile(rb"[!-~]+")

# Seconds for which a file is taken to be as it was.
_FRESH = 1.0

# A text, since the class cannot be subscripted at run time.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class TokenFile:
    """Accepted tokens, one a line; blank lines and lines that begin with # are none.

    The file is read again as it changes. One that cannot be read, or holds no
    token or something else, leaves the last good tokens. Only their hashes are kept.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError or ValueError when there is no token to begin with."""
        self._path = path
        self._clock = clock
        self._hashes = self._read()
        self._read_at = clock()
        self._trouble = ""

    def admits(self, token: str) -> bool:
        """Whether it is one of them; takes as long whichever it is, or if it is none."""
        self._refresh()
        hashed = _hash(token.encode())
        admitted = False
        for known in self._hashes:  # all of them, and not only up to the one that fits
            admitted |= hmac.compare_digest(hashed, known)
        return admitted

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._read_at < _FRESH:
            return
        self._read_at = now
        try:
            self._hashes = self._read()
            self._trouble = ""
        except (OSError, ValueError) as error:
            why = error.strerror or "" if isinstance(error, OSError) else str(error)
            if why != self._trouble:
                _log.error("tokens_not_renewed", file=self._path.name, why=why)
                self._trouble = why

    def _read(self) -> list[bytes]:
        hashes = []
        for number, line in enumerate(self._path.read_bytes().splitlines(), 1):
            token = line.strip()
            if not token or token.startswith(b"#"):
                continue
            # Two words, a table: some other file, whose lines would shut all clients out.
            if not _TOKEN.fullmatch(token):
                raise ValueError(f"{self._path} holds no token in line {number}")
            hashes.append(_hash(token))
        if not hashes:
            raise ValueError(f"{self._path} holds no token")
        return hashes


class BearerAuth(grpc.aio.ServerInterceptor):
    """Lets calls of a service through that carry one of its tokens.

    `rules` are by full service name. Services without a rule are open, as
    health is for the probes of an orchestrator.
    """

    def __init__(self, rules: Mapping[str, TokenFile], on_refusal: Callable[[str], None]) -> None:
        self._rules = dict(rules)
        self._on_refusal = on_refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """See `grpc.aio.ServerInterceptor`."""
        service = handler_call_details.method.rpartition("/")[0].lstrip("/")
        tokens = self._rules.get(service)
        if tokens is None or tokens.admits(_bearer(handler_call_details)):
            return await continuation(handler_call_details)
        self._on_refusal(service)
        return grpc.unary_unary_rpc_method_handler(_refuse)


def _bearer(details: grpc.HandlerCallDetails) -> str:
    for key, value in details.invocation_metadata or ():
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            return token.strip() if scheme.lower() == "bearer" else ""
    return ""


async def _refuse(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    fault = Fault(Reason.UNAUTHENTICATED, "the call carries no token that is accepted here")
    failed = wire_error(fault)
    await context.abort(failed.code, failed.message, failed.trailers)


def _hash(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
