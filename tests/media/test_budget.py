"""The budget never runs over, never leaks and never lets anybody in out of turn."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.faults import Fault, Reason
from router.media.budget import Amount, Budget


async def test_excess_waits_briefly_and_is_then_told_when_to_come_back() -> None:
    budget = Budget(Amount(100, 100), wait=0.01, retry_after=2.5)
    await budget.take(Amount(80), index=0)
    with pytest.raises(Fault) as caught:
        await budget.take(Amount(40), index=4)
    assert caught.value.reason is Reason.MEDIA_BUDGET_FULL
    assert caught.value.retry_after == 2.5
    assert caught.value.metadata["index"] == "4"
    assert (budget.used, budget.waiting) == (Amount(80), 0)


@pytest.mark.parametrize("amount", [Amount(101, 0), Amount(0, 51)])
async def test_what_never_fits_is_refused_at_once(amount: Amount) -> None:
    budget = Budget(Amount(100, 50), wait=3600)
    with pytest.raises(Fault) as caught:
        await budget.take(amount, index=0)
    assert caught.value.reason is Reason.MEDIA_TOO_LARGE


async def test_whoever_waits_is_let_in_when_room_is_given_back() -> None:
    budget = Budget(Amount(100), wait=3600)
    await budget.take(Amount(100), index=0)
    waiting = asyncio.create_task(budget.take(Amount(60), index=1))
    await asyncio.sleep(0)
    assert budget.waiting == 1
    budget.give_back(Amount(60))
    await waiting
    assert budget.used == Amount(100)


async def test_a_small_one_does_not_overtake_a_large_one_that_waits() -> None:
    budget = Budget(Amount(100), wait=3600)
    await budget.take(Amount(50), index=0)
    large = asyncio.create_task(budget.take(Amount(90), index=1))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.take(Amount(10), index=2))
    await asyncio.sleep(0)
    assert not budget.try_take(Amount(1))
    budget.give_back(Amount(50))
    await asyncio.gather(large, small)
    assert budget.used == Amount(100)


async def test_a_cancelled_waiter_takes_nothing_and_lets_the_next_in() -> None:
    budget = Budget(Amount(100), wait=3600)
    await budget.take(Amount(50), index=0)
    large = asyncio.create_task(budget.take(Amount(90), index=1))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.take(Amount(10), index=2))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    await small
    assert (budget.used, budget.waiting) == (Amount(60), 0)


async def test_a_cancel_in_the_moment_of_the_grant_gives_the_grant_back() -> None:
    budget = Budget(Amount(100), wait=3600)
    await budget.take(Amount(100), index=0)
    waiting = asyncio.create_task(budget.take(Amount(100), index=1))
    await asyncio.sleep(0)
    budget.give_back(Amount(100))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.used == Amount()


async def test_room_that_comes_in_the_moment_of_a_cancel_goes_to_the_next() -> None:
    budget = Budget(Amount(100), wait=3600)
    await budget.take(Amount(100), index=0)
    first = asyncio.create_task(budget.take(Amount(100), index=1))
    second = asyncio.create_task(budget.take(Amount(100), index=2))
    await asyncio.sleep(0)
    first.cancel()
    budget.give_back(Amount(100))
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (budget.used, budget.waiting) == (Amount(100), 0)


async def test_a_shared_reservation_is_given_back_by_its_last_holder() -> None:
    budget = Budget(Amount(100))
    first = budget.open()
    await first.grow(Amount(30, 0), index=0)
    second = first.hold()
    first.release()
    assert budget.used == Amount(30)
    second.release()
    assert budget.used == Amount()


async def test_a_reservation_given_back_while_it_waits_takes_nothing() -> None:
    budget = Budget(Amount(100), wait=3600)
    await budget.take(Amount(100), index=0)
    reservation = budget.open()
    growing = asyncio.create_task(reservation.grow(Amount(50), index=0))
    await asyncio.sleep(0)
    reservation.release()
    budget.give_back(Amount(100))
    with pytest.raises(RuntimeError):
        await growing
    assert budget.used == Amount()


async def test_a_reservation_can_shrink_to_what_was_really_used() -> None:
    budget = Budget(Amount(100))
    reservation = budget.open()
    await reservation.grow(Amount(80), index=0)
    reservation.shrink_to(Amount(30))
    assert budget.used == Amount(30)
    reservation.release()
    assert budget.used == Amount()


async def test_waves_over_a_limit_of_one_never_run_two_at_once() -> None:
    budget = Budget(Amount(1), wait=3600)
    active = most = 0

    async def work() -> None:
        nonlocal active, most
        await budget.take(Amount(1), index=0)
        active += 1
        most = max(most, active)
        await asyncio.sleep(0)
        active -= 1
        budget.give_back(Amount(1))

    for _ in range(5):
        await asyncio.gather(*(work() for _ in range(3)))
    assert (most, active, budget.used) == (1, 0, Amount())


STEP = st.tuples(
    st.sampled_from(["take", "release", "cancel", "tick"]),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 30),
)


@given(st.lists(STEP, max_size=60))
def test_no_order_of_events_breaks_the_accounts(steps: list[tuple[str, int, int, int]]) -> None:
    async def run() -> None:
        budget = Budget(Amount(20, 20), wait=3600)
        waiting: list[asyncio.Task[None]] = []
        held: list[Amount] = []

        async def take(amount: Amount) -> None:
            await budget.take(amount, index=0)
            held.append(amount)

        for action, nbytes, pixels, which in steps:
            match action:
                case "take":
                    waiting.append(asyncio.create_task(take(Amount(nbytes, pixels))))
                case "release" if held:
                    budget.give_back(held.pop(which % len(held)))
                case "cancel" if waiting:
                    waiting[which % len(waiting)].cancel()
                case _:
                    await asyncio.sleep(0)
            assert budget.used.fits(budget.limit)
        while waiting:
            for _ in range(3):
                await asyncio.sleep(0)
            # Whoever fits stands no longer in the queue once the loop has run.
            assert budget.used == sum(held, Amount())
            while held:
                budget.give_back(held.pop())
            waiting = [task for task in waiting if not task.done()]
        assert (budget.used, budget.waiting) == (Amount(), 0)

    asyncio.run(run())
