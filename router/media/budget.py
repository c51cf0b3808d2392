"""Bytes and pixels in flight, taken before the work and given back after it.

Without this the scheduler looks idle while thousands of pictures pile up in
host memory. A reservation that can never fit is refused at once; one that does
not fit now waits its turn for a moment and is then refused with a hint when to
come back, so that excess load costs the caller milliseconds and us nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass

from router.faults import Fault, Reason


@dataclass(frozen=True, slots=True)
class Amount:
    """Encoded bytes and decoded pixels."""

    nbytes: int = 0
    pixels: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.nbytes + other.nbytes, self.pixels + other.pixels)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.nbytes - other.nbytes, self.pixels - other.pixels)

    def fits(self, limit: Amount) -> bool:
        """Whether neither part is over the limit's."""
        return self.nbytes <= limit.nbytes and self.pixels <= limit.pixels


@dataclass(slots=True)
class _Waiter:
    amount: Amount
    granted: asyncio.Future[None]


class Budget:
    """The process-wide budget. All methods run on the event loop's thread."""

    def __init__(self, limit: Amount, *, wait: float = 0.05, retry_after: float = 1.0) -> None:
        self._limit = limit
        self._wait = wait
        self._retry_after = retry_after
        self._used = Amount()
        self._waiters: deque[_Waiter] = deque()

    @property
    def limit(self) -> Amount:
        """The most that can be reserved at once."""
        return self._limit

    @property
    def used(self) -> Amount:
        """What is reserved now."""
        return self._used

    @property
    def waiting(self) -> int:
        """How many reservations wait for room."""
        return len(self._waiters)

    def try_take(self, amount: Amount) -> bool:
        """Takes the amount if it fits now and nobody has waited longer."""
        if self._waiters or not (self._used + amount).fits(self._limit):
            return False
        self._used += amount
        return True

    async def take(self, amount: Amount, *, index: int) -> None:
        """Takes the amount, waiting briefly for others to give back.

        Raises Fault MEDIA_TOO_LARGE when it can never fit, MEDIA_BUDGET_FULL
        (with `retry_after`) when it does not fit within the wait.
        """
        if not amount.fits(self._limit):
            raise too_large(index, "the router's media budget", amount, self._limit)
        if self.try_take(amount):
            return
        waiter = _Waiter(amount, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._wait):
                await waiter.granted
        except BaseException as error:
            self._leave(waiter)
            if isinstance(error, TimeoutError):
                raise self._full(index) from None
            raise

    def give_back(self, amount: Amount) -> None:
        """Gives back what was taken, and lets waiters in, first come first served."""
        self._used -= amount
        assert self._used.nbytes >= 0 and self._used.pixels >= 0, "gave back more than was taken"
        self._admit()

    def open(self) -> Reservation:
        """An empty reservation that can grow."""
        return Reservation(self)

    def _full(self, index: int) -> Fault:
        return Fault(
            Reason.MEDIA_BUDGET_FULL,
            f"media item {index}: the router has no room for more media at the moment",
            metadata={"index": str(index)},
            retry_after=self._retry_after,
        )

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.granted.done() and not waiter.granted.cancelled():
            # Granted in the very moment of the cancel or timeout.
            self.give_back(waiter.amount)
            return
        with contextlib.suppress(ValueError):  # or passed over already
            self._waiters.remove(waiter)
        self._admit()

    def _admit(self) -> None:
        while self._waiters:
            first = self._waiters[0]
            if first.granted.done():
                # Cancelled or out of time, but its task has not run yet.
                self._waiters.popleft()
                continue
            if not (self._used + first.amount).fits(self._limit):
                return
            self._waiters.popleft()
            self._used += first.amount
            first.granted.set_result(None)


class Reservation:
    """A part of the budget that several holders may share.

    It starts with one holder and is given back, whole and once, when the last
    holder lets go: one download that three requests wait for is counted once.
    """

    __slots__ = ("_amount", "_budget", "_holders")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._amount = Amount()
        self._holders = 1

    @property
    def amount(self) -> Amount:
        """What is reserved."""
        return self._amount

    async def grow(self, amount: Amount, *, index: int) -> None:
        """Takes more. Raises as `Budget.take`."""
        whole = self._amount + amount
        if not whole.fits(self._budget.limit):
            raise too_large(index, "the router's media budget", whole, self._budget.limit)
        await self._budget.take(amount, index=index)
        if self._holders == 0:
            # Everyone has let go meanwhile: nobody would give this back.
            self._budget.give_back(amount)
            raise RuntimeError("the reservation was given back")
        self._amount += amount

    def shrink_to(self, amount: Amount) -> None:
        """Gives back what is over `amount`."""
        over = self._amount - amount
        assert over.nbytes >= 0 and over.pixels >= 0
        self._amount = amount
        self._budget.give_back(over)

    def hold(self) -> Reservation:
        """Adds a holder."""
        assert self._holders > 0, "a reservation that was given back cannot be held again"
        self._holders += 1
        return self

    def release(self) -> None:
        """Lets go; the last holder gives everything back."""
        assert self._holders > 0, "released more often than held"
        self._holders -= 1
        if self._holders == 0:
            amount, self._amount = self._amount, Amount()
            self._budget.give_back(amount)


def too_large(index: int, what: str, amount: Amount, limit: Amount) -> Fault:
    """The fault for an amount that no waiting would make fit."""
    if amount.nbytes > limit.nbytes:
        size, most, unit = amount.nbytes, limit.nbytes, "bytes"
    else:
        size, most, unit = amount.pixels, limit.pixels, "pixels"
    return Fault.of_item(
        Reason.MEDIA_TOO_LARGE,
        index,
        f"{size} {unit} are over the limit of {most} of {what}",
        size=size,
        limit=most,
    )
