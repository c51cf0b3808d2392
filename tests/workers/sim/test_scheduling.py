"""Who runs, who waits, who is refused; prefill and decode take their time."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from router.wire import common, engine
from tests.workers.sim.client import Client, client_of, prompt, streamed
from workers.sim import SimOptions
from workers.sim.job import Job

HANG = "[[sim: hang-after-chunks=1]]"
# Seconds by which a timer and the clock that it is measured by may differ.
CLOCKS = 0.01


async def running(client: Client, count: int) -> list[grpc.aio.UnaryStreamCall]:
    """Calls that run and say no more than one chunk."""
    calls = [client.stub.Generate(streamed(HANG, f"hang {at}")) for at in range(count)]
    for call in calls:
        await call.read()
    return calls


async def until_waiting(client: Client, count: int) -> None:
    # What it waits for happens in this very loop, within a few turns.
    while client.worker.scheduler.waiting != count:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_one_more_than_may_run_waits_and_one_more_than_may_wait_is_refused() -> None:
    async with client_of(SimOptions(max_num_seqs=2)) as client:
        calls = await running(client, 2)
        waiting = [asyncio.create_task(client.say(prompt("x"))) for _ in range(2)]
        await until_waiting(client, 2)
        error = await client.refusal(prompt("x"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert (error.details() or "").startswith("worker is saturated")
        for call in calls:
            call.cancel()
        assert await asyncio.gather(*waiting)


async def test_those_who_wait_start_in_the_order_they_came() -> None:
    async with client_of(SimOptions(max_num_seqs=1)) as client:
        (first,) = await running(client, 1)
        done: list[str] = []

        async def ask(name: str) -> None:
            await client.say(prompt(name, name))
            done.append(name)

        tasks = []
        options = client.worker.options
        assert options.waiting_limit == 1
        client.worker.change(max_waiting=3)
        for at, name in enumerate("abc"):
            tasks.append(asyncio.create_task(ask(name)))
            await until_waiting(client, at + 1)
        first.cancel()
        await asyncio.gather(*tasks)
    assert done == ["a", "b", "c"]


async def test_an_abort_reaches_a_request_that_waits() -> None:
    async with client_of(SimOptions(max_num_seqs=1)) as client:
        (first,) = await running(client, 1)
        waiting = asyncio.create_task(client.generate(prompt("x", "me")))
        await until_waiting(client, 1)
        await client.stub.Abort(engine.AbortRequest(request_ids=["me"]))
        (response,) = await waiting
        assert response.complete.finish_reason == "abort"
        assert client.worker.scheduler.waiting == 0
        first.cancel()


async def test_a_cancel_takes_a_waiting_request_out_of_the_queue() -> None:
    async with client_of(SimOptions(max_num_seqs=1)) as client:
        (first,) = await running(client, 1)
        waiting = client.stub.Generate(prompt("x"))
        await until_waiting(client, 1)
        waiting.cancel()
        await until_waiting(client, 0)
        first.cancel()


async def test_requests_take_turns_at_the_prefill() -> None:
    async with client_of(SimOptions(prefill_rate=10_000, prefix_caching=False)) as client:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.gather(*(client.say(prompt("x" * 500, str(at))) for at in range(3)))
        assert loop.time() - start >= 3 * 0.05 - CLOCKS


async def test_cached_tokens_need_no_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    pause = Job.pause

    async def noted(job: Job, seconds: float | None) -> None:
        asked.append(seconds or 0.0)
        await pause(job, seconds)

    async with client_of(SimOptions(prefill_rate=5_000)) as client:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await client.say(prompt("x" * 500))
        assert loop.time() - start >= 0.1 - CLOCKS
        monkeypatch.setattr(Job, "pause", noted)
        (response,) = await client.generate(prompt("x" * 500))
    assert response.complete.cached_tokens == 496
    # Those of four tokens, whatever the machine made of them.
    assert asked and sum(asked) <= 4 / 5_000


async def test_each_output_token_takes_its_time() -> None:
    async with client_of(SimOptions(time_per_output_token=0.005)) as client:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await client.generate(streamed("x", max_tokens=20))
        assert loop.time() - start >= 20 * 0.005 - CLOCKS


async def test_loads_say_who_runs_and_who_waits() -> None:
    async with client_of(SimOptions(max_num_seqs=1, prefix_caching=False)) as client:
        (first,) = await running(client, 1)
        waiting = client.stub.Generate(prompt("x" * 100))
        await until_waiting(client, 1)
        loads = await client.stub.GetLoads(engine.GetLoadsRequest())
        (load,) = loads.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 1, 2)
        assert load.num_waiting_uncached_tokens == 100
        assert load.max_running_requests == 1
        assert 0 < load.token_usage < 1
        first.cancel()
        waiting.cancel()


async def test_a_request_waits_for_room_in_the_cache() -> None:
    async with client_of(SimOptions(kv_blocks=20, block_size=16)) as client:
        (first,) = await running(client, 1)
        waiting = asyncio.create_task(client.generate(prompt("x" * 200)))
        await until_waiting(client, 1)
        first.cancel()
        assert await waiting


async def test_a_flush_empties_the_cache_once_nothing_runs() -> None:
    async with client_of() as client:
        (first,) = await running(client, 1)
        refused = await client.stub.FlushCache(common.FlushCacheRequest())
        assert not refused.success
        patient = asyncio.create_task(_flush(client, 20))
        first.cancel()
        assert (await patient).success
        assert client.worker.cache.used == 0


async def _flush(client: Client, timeout: float) -> common.FlushCacheResponse:
    response: common.FlushCacheResponse = await client.stub.FlushCache(
        common.FlushCacheRequest(timeout_s=timeout)
    )
    return response
