"""Traces: the steps of a request as spans, and nothing at all unless they are switched on.

What stands here is the router without traces: every step is given one and the
same empty span. `otel.py` is imported only where `--otlp-endpoint` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

Value = str | bool | int | float | Sequence[str]
Metadata = Iterable[tuple[str, str | bytes]]


class Span:
    """One step, while it runs."""

    # Hex, empty without traces.
    trace_id = ""

    def tell(self, attributes: Mapping[str, Value]) -> None:
        """Adds attributes."""

    def fail(self, kind: str, message: str = "") -> None:
        """Marks the step as failed; `kind` is a word of few, `message` a sentence."""

    def child(self, name: str, began: float, ended: float) -> None:
        """A step within this one that is over already; monotonic seconds."""

    def headers(self) -> tuple[tuple[str, str], ...]:
        """W3C trace context for a call that belongs to this step, as gRPC metadata."""
        return ()


_NOTHING = nullcontext(Span())


class Tracing:
    """Opens spans; within a task each belongs to the one that is open."""

    on = False

    def server(
        self, method: str, metadata: Callable[[], Metadata | None]
    ) -> AbstractContextManager[Span]:
        """An RPC that is served; `metadata` is the client's, with its trace context."""
        return _NOTHING

    def client(self, method: str, address: str) -> AbstractContextManager[Span]:
        """An RPC that is made to HOST:PORT."""
        return _NOTHING

    def step(self, name: str) -> AbstractContextManager[Span]:
        """Anything between."""
        return _NOTHING

    def close(self) -> None:
        """Sends what is left; blocks."""
