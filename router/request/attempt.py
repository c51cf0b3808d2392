"""Orders on their way: what was asked, the calls made for it, and which of them run now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import grpc

from router.fleet.worker import Lease, Worker
from router.observe.logging import get_logger
from router.policy.base import RoutingView
from router.prefix.learn import References
from router.request.active import Aborted, ActiveRequest
from router.request.admission import draining
from router.request.constraint import WireConstraint
from router.request.failure import Media
from router.request.relay import AttemptFailed, Progress, being_cancelled
from router.wire import engine

_log = get_logger("request")

# What a client is told whose request the router has ended.
CUT = "the router stopped before the request was done"
_ABORT_TIMEOUT = 2.0
_SHOWN_ID = 128
# What gRPC may add, in milliseconds, when it makes a deadline of a timeout and tells it.
_ROUNDING_MS = 2


@dataclass
class Attempt:
    """One call of one worker, on a lease. `id` is the request id that the worker sees.

    `aborted` says that the worker was asked to end it. `headers` go to the
    worker as metadata. `on_break` hears of a failure after the first output,
    and may make it one that another worker can go on from. `call` is the call
    itself while it runs, `told` is set when the worker was asked to end it, and
    `over` when the attempt has ended.
    """

    lease: Lease
    id: str
    deadline: float
    progress: Progress = field(default_factory=Progress)
    aborted: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    method: str = "Generate"
    on_break: Callable[[AttemptFailed], None] | None = None
    was_cut: bool = False
    call: grpc.aio.Call | None = None
    told: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def worker(self) -> Worker:
        return self.lease.worker

    @property
    def ended(self) -> Exception | None:
        """What it ends with unless its worker ends it well; None where nobody ended it."""
        if self.was_cut:
            return draining(CUT)
        return Aborted() if self.aborted else None

    def begin(self) -> None:
        """To be asked before the worker is called. Raises what ended the attempt, if anything.

        A worker that was told to end a request which it did not have yet would serve it.
        """
        if ended := self.ended:
            raise ended

    async def cut(self) -> None:
        """Ends the request for the router's own sake: the client is told so, and the worker."""
        self.was_cut = True
        await self.tell_abort()

    def time_left(self) -> float:
        """A timeout in seconds, at least a little, whose end the worker does not see after
        the request's deadline.
        """
        return whole_timeout(self.deadline - asyncio.get_running_loop().time())

    async def tell_abort(self) -> None:
        """Asks the worker to end the request, and sees to it that its call ends.

        The question may overtake the request, whose megabytes take a while, and
        a worker that hangs does not heed it. Of a client that reads slowly no
        worker is to blame.
        """
        self.aborted = True
        try:
            await self._ask_to_abort()
        finally:
            self.told.set()
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT):
                await self.over.wait()
        except TimeoutError:
            if self.call is not None and not self.progress.writing:
                self.call.cancel()

    async def _ask_to_abort(self) -> None:
        try:
            await self.worker.stub.Abort(
                engine.AbortRequest(request_ids=[self.id]), timeout=_ABORT_TIMEOUT
            )
        except grpc.aio.AioRpcError as error:
            _log.warning("abort_failed", worker=self.worker.address, code=error.code().name)
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # The channel was closed under the call: the worker is gone, and the request with it.
            if being_cancelled():
                raise


def shown_id(request_id: str) -> str:
    """A client's id, which may be of any length, as people are to see it elsewhere."""
    return request_id[:_SHOWN_ID]


def whole_timeout(seconds: float) -> float:
    """The longest timeout, at least 1 ms, that no server is told as more than `seconds`.

    gRPC tells three digits of it, rounded up: 9.991 s would become 10 s, and 599.1 s ten minutes.
    """
    ms = int(seconds * 1000) - _ROUNDING_MS
    if ms < 1000:
        return max(1, ms) / 1000
    step: int = 10 ** (len(str(ms)) - 3)
    return (ms // step * step - _ROUNDING_MS) / 1000


@dataclass(frozen=True)
class Order:
    """A prepared request on its way. `deadline` is loop time.

    `media` is what its worker has to read, `references` are media whose names
    at the worker may be learned. `active` is the client's request.
    """

    request_id: str
    constraint: WireConstraint
    view: RoutingView
    deadline: float
    media: Media = Media.NONE
    method: str = "Generate"
    references: References | None = None
    active: ActiveRequest | None = None

    def grown_by(self, tokens: int) -> Order:
        """The same order for a prompt that is longer by so many tokens."""
        if not tokens:
            return self
        known = self.constraint.prompt_tokens
        return replace(
            self,
            constraint=replace(self.constraint, prompt_tokens=known + tokens if known else 0),
            view=replace(self.view, prompt_tokens=self.view.prompt_tokens + tokens),
        )


@dataclass
class Journey:
    """What became of an order, for logs, metrics and the client's trailing metadata."""

    attempts: int = 0
    worker: str = ""
    progress: Progress = field(default_factory=Progress)
    # Of attempts that broke off after output, and that others went on from.
    former: list[Progress] = field(default_factory=list)

    def begin(self, worker: str, progress: Progress) -> None:
        """Notes another attempt."""
        if self.progress.started:
            self.former.append(self.progress)
        self.attempts += 1
        self.worker, self.progress = worker, progress

    @property
    def parts(self) -> list[Progress]:
        """Everything that came of it, in order."""
        return [*self.former, self.progress]

    @property
    def first_output_at(self) -> float | None:
        """Monotonic seconds; None while there was no output."""
        return self.parts[0].first_output_at

    @property
    def prompt_tokens(self) -> int:
        """As the worker counted them, without what it got of the output; 0 when it did not."""
        got = sum(part.output_tokens for part in self.former)
        return max(0, self.progress.prompt_tokens - got)

    @property
    def output_tokens(self) -> int:
        """Ids that went to the client."""
        return sum(part.output_tokens for part in self.parts)


@dataclass
class Running:
    """Which attempts serve which client's request id now, so that Abort can reach them."""

    _attempts: dict[str, list[Attempt]] = field(default_factory=dict)

    def add(self, request_id: str, attempt: Attempt) -> None:
        self._attempts.setdefault(request_id, []).append(attempt)

    def remove(self, request_id: str, attempt: Attempt) -> None:
        attempts = self._attempts[request_id]
        attempts.remove(attempt)
        if not attempts:
            del self._attempts[request_id]

    def of(self, request_id: str) -> list[Attempt]:
        return list(self._attempts.get(request_id, ()))

    def all(self) -> list[Attempt]:
        return [attempt for attempts in self._attempts.values() for attempt in attempts]
