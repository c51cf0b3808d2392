"""A prepared request between its attempts."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import DecodeError

from router.faults import Reason
from router.media.ticket import Ticket
from router.policy.base import RoutingView
from router.request.constraint import WireConstraint
from router.request.failure import movable
from router.request.migrate import Continuation
from router.request.prepared import Body, Prepared
from router.request.relay import AttemptFailed


class Ready:
    """A prepared request, and what it holds for as long as there may be another attempt."""

    def __init__(
        self,
        prepared: Prepared,
        constraint: WireConstraint,
        view: RoutingView,
        ticket: Ticket,
        *,
        pairs: bool,
        continuation: Continuation | None = None,
    ) -> None:
        self.constraint = constraint
        self.pairs = pairs
        self.view = view
        self.references = prepared.references
        self._body: Body | None = prepared.body
        self._ticket = ticket
        # None where the stream may not move to another worker.
        self._continuation = continuation

    @property
    def body(self) -> Body:
        """What an attempt's bytes are made from."""
        assert self._body is not None, "no attempt is made after the first output"
        return self._body

    def first_output(self) -> None:
        """Lets go of tensors and media budget, unless the stream may move to another worker."""
        if self._continuation is None and self._body is not None:
            self._body.request.Clear()
            self._body = None
            self._ticket.close()

    @property
    def through(self) -> Callable[[bytes], bytes] | None:
        """What each message passes through on its way to the client; None for nothing."""
        return self._keep_and_translate if self._continuation is not None else None

    def move(self, failed: AttemptFailed) -> None:
        """Makes a broken stream's failure one after which another worker goes on, if it can."""
        if self._continuation is None or self._body is None:
            return
        if failed.why.fault.reason is Reason.WORKER_STREAM_BROKEN:
            try:
                grown = self._continuation.resume(self._body.request)
            except DecodeError:
                return
            if not self._continuation.exhausted(self._body.request):
                failed.why, failed.grown = movable(failed.why), grown

    def _keep_and_translate(self, message: bytes) -> bytes:
        assert self._continuation is not None
        self._continuation.keep(message)
        return self._continuation.translate(message)
