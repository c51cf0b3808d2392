"""Requests go to where their prompts are cached, and what that rests on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from router import config
from router.policy.base import Candidate
from router.prefix.resident import Resident
from router.wire import admin, engine
from tests.media.server import fixed, running
from tests.serving import (
    MODEL,
    PICTURE,
    Serving,
    completes,
    data_url,
    eventually,
    image,
    seeing,
    serving,
    tokenized,
)
from workers.sim import SimOptions, SimWorker

BLOCK = 16
TENSORS_ONLY = SimOptions(mm_processor="")
SILENT = SimOptions(kv_events=False)


def text(name: str, blocks: int = 20) -> str:
    """A prompt of at least so many blocks; another for each name."""
    return f"{name} " * (blocks * BLOCK)


@asynccontextmanager
async def routing(*workers: SimOptions | str, **settings: Any) -> AsyncIterator[Serving]:
    """A router that goes by prefixes, and follows its workers' events where they have any."""
    async with serving(*workers, policy="prefix", **settings) as served:
        await eventually(lambda: all(resident(served, w) for w in served.app.registry), "residents")
        loud = [w for w in served.workers if w.options.kv_events]
        await eventually(lambda: all(w.events.readers for w in loud), "subscriptions")
        await eventually(lambda: reporting(served) >= len(loud))
        yield served


def resident(served: Serving, worker: Candidate) -> Resident | None:
    return served.app.residents.of(worker)


def reporting(served: Serving) -> int:
    """How many workers' events are followed now."""
    found = [resident(served, worker) for worker in served.app.registry]
    return sum(one is not None and one.reporting for one in found)


def blocks_held(served: Serving) -> float:
    return served.metric("router_prefix_index_blocks", model=MODEL)


async def reported(served: Serving) -> None:
    """Waits until the router has heard of all that the workers have."""
    await eventually(
        lambda: (
            served.metric("router_prefix_index_holdings", model=MODEL)
            == sum(w.cache.used for w in served.workers)
        ),
        "all blocks reported",
    )


async def where(served: Serving, request: engine.GenerateRequest) -> str:
    return (await served.route(request))["worker"]


# -- Where it goes


async def test_a_prompt_goes_back_to_where_it_was() -> None:
    async with routing(*[SimOptions()] * 4) as served:
        homes = {}
        for name in "abcdefgh":
            homes[name] = await where(served, tokenized(text(name)))
        assert len(set(homes.values())) > 1, "prompts that share nothing spread"
        await reported(served)
        for name, home in homes.items():
            request = tokenized(text(name) + " and a question")
            assert await where(served, request) == home
        asked = served.metric("router_prefix_blocks_asked_total", model=MODEL)
        matched = served.metric("router_prefix_blocks_matched_total", model=MODEL)
        assert 0.4 * asked < matched < asked
        assert served.metric("router_kv_event_lag_seconds_count") >= len(homes)


async def test_text_is_scored_by_its_tokens() -> None:
    async with routing(*[SimOptions()] * 4) as served:
        home = await where(served, tokenized(text("a")))
        await reported(served)
        for _ in range(6):
            assert await where(served, engine.GenerateRequest(text=text("a"))) == home


async def test_pictures_gather_by_what_they_show_wherever_they_are_processed() -> None:
    for options, settings in (
        (TENSORS_ONLY, {}),
        (SimOptions(), {"mm_processing": "worker"}),
    ):
        async with routing(*[options] * 4, **settings) as served:
            first, second = data_url("icc_203x151.jpg"), data_url("noise_299x211.jpg")
            homes = {url: await where(served, seeing(PICTURE, url)) for url in (first, second)}
            await reported(served)
            for url, home in homes.items():
                for _ in range(4):
                    responses = await served.generate(seeing(PICTURE + " Why?", url))
                    cached = completes(responses)[0].cached_tokens
                    assert cached >= BLOCK, (options.mm_processor, home)


async def test_other_pictures_of_the_same_size_match_only_up_to_their_place() -> None:
    # Both are 203x151, and the prompts differ in nothing else.
    first, second = data_url("grey_203x151.png"), data_url("palette_203x151.png")
    before = "word " * (3 * BLOCK)
    for options, settings in (
        (TENSORS_ONLY, {}),
        (SimOptions(), {"mm_processing": "worker"}),
    ):
        async with routing(options, **settings) as served:
            await served.route(seeing(before + PICTURE, first))
            await reported(served)
            same = await explained(served, seeing(before + PICTURE, first))
            other = await explained(served, seeing(before + PICTURE, second))
            (at,), (elsewhere,) = same.workers, other.workers
            assert elsewhere.matched_blocks < at.matched_blocks
            assert elsewhere.matched_blocks >= 3


async def test_a_picture_on_the_web_is_known_by_its_url_without_the_signature() -> None:
    async with (
        running() as host,
        routing(SimOptions(), mm_processing="worker", media_allow_private_hosts=True) as served,
    ):
        host.routes["/photo.jpg"] = fixed(image("photo_640x480.jpg"))
        signed = "/photo.jpg?X-Amz-Date={0}&X-Amz-Signature={0}"
        await served.route(seeing(PICTURE, host.url(signed.format("one"))))
        sent = served.workers[0].stats.received[-1].request.media_refs.items[0].url
        assert sent == host.url(signed.format("one")), "what is forwarded is untouched"
        again = await explained(served, seeing(PICTURE, host.url(signed.format("two"))))
        assert again.workers[0].matched_blocks > 10
        for target in ("/photo.jpg?id=1", "/photo.jpg?id=2"):
            other = await explained(served, seeing(PICTURE, host.url(target)))
            assert other.workers[0].matched_blocks == 0


async def test_a_burst_of_siblings_goes_together_before_any_event() -> None:
    slow = SimOptions(prefill_rate=20_000.0)
    async with routing(*[slow] * 4) as served:
        # Long enough to be worth waiting for.
        request = text("a", 120)
        first = asyncio.create_task(where(served, tokenized(request)))
        await eventually(lambda: any(w.load.in_flight for w in served.app.registry))
        rest = [where(served, tokenized(f"{request} {n}")) for n in range(5)]
        assert set(await asyncio.gather(*rest)) == {await first}


async def test_one_prefix_in_every_prompt_does_not_send_all_to_one_worker() -> None:
    slow = SimOptions(prefill_rate=2_000.0)
    async with routing(*[slow] * 4) as served:
        system = text("system", 4)
        await asyncio.gather(
            *(where(served, tokenized(system + text(str(n), 6))) for n in range(24))
        )
        calls = [w.stats.calls["Generate"] for w in served.workers]
        assert min(calls) >= 3, calls


# -- What it rests on


async def test_workers_without_events_are_known_by_our_own_choices() -> None:
    async with routing(*[SILENT] * 4) as served:
        home = await where(served, tokenized(text("a")))
        for _ in range(6):
            assert await where(served, tokenized(text("a"))) == home
        assert blocks_held(served) == 0
        assert served.metric("router_prefix_index_expected_blocks", model=MODEL) >= 20


async def test_a_new_router_learns_again_from_its_own_choices() -> None:
    async with routing(*[SimOptions()] * 4) as served:
        home = await where(served, tokenized(text("a")))
        addresses = [w.address for w in served.workers]
        # What workers had before nobody tells a router that comes later.
        async with routing(*addresses) as later:
            assert blocks_held(later) == 0
            new_home = await where(later, tokenized(text("a")))
            for _ in range(6):
                assert await where(later, tokenized(text("a"))) == new_home
        assert home in addresses


async def test_what_a_removed_worker_had_goes_with_it() -> None:
    async with routing(SimOptions(), SimOptions()) as served:
        for name in "abcdefgh":
            await where(served, tokenized(text(name)))
        await reported(served)
        gone, left = served.worker(0), served.worker(1)
        had = served.workers[1].cache.used
        assert 0 < had < blocks_held(served)
        await served.app.fleet.remove(gone)
        assert blocks_held(served) == had
        await eventually(lambda: not served.workers[0].events.readers, "its stream is closed")
        again = served.app.fleet.add(gone.address)
        await eventually(lambda: served.workers[0].events.readers == 1)
        assert resident(served, again) is not resident(served, left)
        assert blocks_held(served) == had
        assert served.app.residents.of(gone) is None


async def test_a_cache_that_was_flushed_holds_nothing() -> None:
    async with routing(SimOptions()) as served:
        await where(served, tokenized(text("a")))
        await reported(served)
        assert blocks_held(served) > 0
        served.workers[0].scheduler.flush()
        await eventually(lambda: blocks_held(served) == 0)


async def test_missed_events_make_what_was_known_void_once() -> None:
    async with routing(SimOptions()) as served:
        await where(served, tokenized(text("a")))
        await reported(served)
        worker = served.workers[0]
        worker.events.skip(2)
        await where(served, tokenized(text("b")))
        resyncs = {"worker": worker.address}
        await eventually(lambda: served.metric("router_kv_event_resyncs_total", **resyncs) == 1)
        # The next stream, and not the last of the one before, whose end may be seen late.
        await eventually(lambda: worker.stats.calls["SubscribeKvEvents"] == 2)
        await eventually(lambda: reporting(served) == 1)
        await where(served, tokenized(text("c")))
        await eventually(lambda: blocks_held(served) > 0)
        assert served.metric("router_kv_event_resyncs_total", **resyncs) == 1


async def test_a_worker_that_dies_with_the_prefix_costs_an_attempt_and_no_more() -> None:
    async with routing(SimOptions(), SimOptions(), health_interval="1h") as served:
        home = await where(served, tokenized(text("a")))
        await reported(served)
        for worker in served.workers:
            if worker.address == home:
                worker.troubles.add("fail=UNAVAILABLE")
        route = await served.route(tokenized(text("a")))
        assert route["attempts"] == "2"
        assert route["worker"] != home


async def test_loads_are_pushed_with_the_events_and_not_asked_for() -> None:
    async with routing(SimOptions(heartbeat=0.05)) as served:
        worker = served.workers[0]
        await eventually(lambda: served.worker().load.pushing)
        await asyncio.sleep(0)
        asked = worker.stats.calls["GetLoads"]
        pushed = {"worker": worker.address, "source": "pushed"}
        before = served.metric("router_worker_load_reports_total", **pushed)
        await eventually(
            lambda: served.metric("router_worker_load_reports_total", **pushed) > before + 5
        )
        assert worker.stats.calls["GetLoads"] <= asked + 1


async def test_nothing_is_left_open_when_the_router_ends() -> None:
    worker = SimWorker(SimOptions())
    address = await worker.start("127.0.0.1:0")
    try:
        async with routing(address):
            await eventually(lambda: worker.events.readers == 1)
        await eventually(lambda: worker.events.readers == 0)
    finally:
        await worker.stop(0)


# -- What is told of it


async def explained(served: Serving, request: engine.GenerateRequest) -> admin.ExplainResponse:
    answer: admin.ExplainResponse = await served.admin.Explain(
        admin.ExplainRequest(request=request), timeout=10
    )
    return answer


async def test_explain_tells_what_the_choice_goes_by_and_changes_nothing() -> None:
    async with routing(SimOptions(), SimOptions()) as served:
        home = await where(served, tokenized(text("a")))
        await reported(served)
        expected = served.metric("router_prefix_index_expected_blocks", model=MODEL)
        for _ in range(3):
            shown = await explained(served, tokenized(text("a")))
            assert shown.picked == home
            assert shown.prefixes == "scored with a credit of 1"
            at = {w.address: w for w in shown.workers}
            matched = at.pop(home)
            (other,) = at.values()
            assert matched.matched_blocks >= 20 > other.matched_blocks == 0
            assert matched.cost < other.cost
        assert served.metric("router_prefix_index_expected_blocks", model=MODEL) == expected


async def test_explain_tells_why_prefixes_do_not_count() -> None:
    for settings, why in (
        ({"policy": "least_load"}, "not scored: the policy is least_load"),
        ({"policy": "prefix", "prefix_credit": 0}, "not scored: prefix_credit is 0"),
    ):
        async with serving(SimOptions(), SimOptions(), **settings) as served:
            shown = await explained(served, tokenized("x"))
            assert shown.prefixes == why
            assert all(
                w.HasField("cost") and not w.HasField("matched_blocks") for w in shown.workers
            )


async def test_each_model_has_a_policy_and_an_index_of_its_own() -> None:
    own = {"small": config.ModelSettings(policy="round_robin")}
    async with serving(
        SimOptions(), SimOptions(served_model="small"), policy="prefix", models=own
    ) as served:
        big, small = served.workers
        await eventually(lambda: big.events.readers == 1)
        for model in (MODEL, "small"):
            request = tokenized(text("a"))
            request.router.model = model
            await served.route(request)
        assert [name for name, _ in served.app.residents.indexes()] == [MODEL]
        assert small.stats.calls["SubscribeKvEvents"] == 0
        for policy in ("prefix", "round_robin"):
            labels = {"policy": policy, "leg": "single"}
            assert served.metric("router_selections_total", **labels) == 1
