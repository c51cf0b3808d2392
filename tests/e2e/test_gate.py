"""Work for routing is done for a choice that will use it, and for no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np
import pytest

from router.config import ModelSettings
from router.fleet.tokens import TokenCounter
from router.prefix import blocks
from router.request import prepare
from router.wire import admin, engine
from tests.e2e.pairs import decoding, prefilling
from tests.media.server import Server, fixed, running
from tests.serving import (
    MODEL,
    PICTURE,
    Serving,
    data_url,
    eventually,
    image,
    seeing,
    serving,
    tokenized,
)
from workers.sim import SimOptions

POLICIES = ("round_robin", "random", "power_of_two", "least_load", "consistent_hash", "prefix")
BY_LENGTH = {"power_of_two", "least_load"}


@dataclass
class Work:
    """How often something was done in this process for routing's sake."""

    done: Counter[str] = field(default_factory=Counter)

    def taken(self) -> dict[str, bool]:
        """What was done since the last time."""
        done, self.done = self.done, Counter()
        return {kind: done[kind] > 0 for kind in ("keys", "names", "tokens")}


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    seen = Work()

    def counting(kind: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            seen.done[kind] += 1
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(blocks, "prompt_keys", counting("keys", blocks.prompt_keys))
    monkeypatch.setattr(prepare, "item_identity", counting("names", prepare.item_identity))
    monkeypatch.setattr(TokenCounter, "ids", counting("tokens", TokenCounter.ids))
    yield seen


def ranged(host: Server) -> int:
    """GETs that asked for the beginning of a file only; workers fetch whole ones."""
    return sum("range" in request.headers for request in host.requests)


def decodes(served: Serving) -> float:
    """How many pictures were decoded."""
    return served.metric("router_media_stage_seconds_count", stage="decode")


def with_credit(request: engine.GenerateRequest, credit: float | None) -> engine.GenerateRequest:
    if credit is not None:
        request.router.prefix_credit = credit
    return request


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("credit", [0.0, 1.0])
@pytest.mark.parametrize("events", [True, False])
async def test_the_gate_is_the_same_on_every_path(
    work: Work, policy: str, credit: float, events: bool
) -> None:
    sim = SimOptions(kv_events=events)
    settings = {"policy": policy, "prefix_credit": credit, "media_allow_private_hosts": True}
    async with (
        running() as host,
        serving(sim, sim, mm_processing="worker", **settings) as served,
    ):
        followed = policy == "prefix" and credit > 0
        if followed:
            await eventually(lambda: all(subscriptions(served)))
        work.taken()
        for number, own in enumerate((None, 0.0, 1.0)):
            scores = policy == "prefix" and (credit if own is None else own) > 0
            await served.route(with_credit(tokenized("word " * 40), own))
            assert work.taken() == {"keys": scores, "names": False, "tokens": False}
            await served.route(with_credit(engine.GenerateRequest(text="word " * 40), own))
            assert work.taken() == {"keys": scores, "names": False, "tokens": scores}
            await served.route(with_credit(seeing(PICTURE, data_url("icc_203x151.jpg")), own))
            assert work.taken() == {"keys": scores, "names": scores, "tokens": False}
            path = f"/{number}.jpg"
            host.routes[path] = fixed(image("photo_640x480.jpg"))
            before = ranged(host)
            await served.route(with_credit(seeing(PICTURE, host.url(path)), own))
            assert (ranged(host) > before) == (scores or policy in BY_LENGTH)
            assert work.taken() == {"keys": scores, "names": False, "tokens": False}
        assert subscriptions(served) == [followed] * 2
        assert bool(list(served.app.residents.indexes())) == (policy == "prefix")


def subscriptions(served: Serving) -> list[bool]:
    return [w.stats.calls["SubscribeKvEvents"] > 0 for w in served.workers]


@pytest.mark.parametrize("policy", POLICIES)
async def test_in_the_router_pictures_are_fetched_once_whatever_the_policy(
    work: Work, policy: str
) -> None:
    sim = SimOptions(mm_processor="")
    async with (
        running() as host,
        serving(sim, sim, policy=policy, media_allow_private_hosts=True) as served,
    ):
        host.routes["/photo.jpg"] = fixed(image("photo_640x480.jpg"))
        work.taken()
        await served.route(seeing(PICTURE, host.url("/photo.jpg")))
        assert [r.headers.get("range") for r in host.requests] == [None]
        assert work.taken()["keys"] == (policy == "prefix")


async def test_round_robin_in_worker_mode_asks_no_media_host_for_anything() -> None:
    async with (
        running() as host,
        # No worker is there to fetch either: the request fails before one is called.
        serving(
            SimOptions(faults=("fail=UNAVAILABLE",)),
            mm_processing="worker",
            media_allow_private_hosts=True,
            retry_max_attempts=1,
        ) as served,
    ):
        refused = await served.refusal(seeing(PICTURE, host.url("/photo.jpg")))
        assert refused.reason == "WORKER_UNAVAILABLE"
        assert (host.connections, host.requests) == (0, [])


async def test_a_models_own_settings_decide_for_it(work: Work) -> None:
    own = {"plain": ModelSettings(prefix_credit=0.0)}
    sim = SimOptions(served_model="plain")
    async with serving(SimOptions(), sim, policy="prefix", models=own) as served:
        await eventually(lambda: subscriptions(served) == [True, False])
        work.taken()
        for model, scores in ((MODEL, True), ("plain", False)):
            request = tokenized("word " * 40)
            request.router.model = model
            await served.route(request)
            assert work.taken()["keys"] == scores
        assert subscriptions(served) == [True, False]


async def test_a_decode_leg_asks_for_itself() -> None:
    async with serving(
        prefilling(kv_role="kv_producer"), decoding(kv_role="kv_consumer"), policy="prefix"
    ) as served:
        await eventually(lambda: subscriptions(served)[0])
        for _ in range(3):
            await served.generate(tokenized("word " * 40))
        assert subscriptions(served) == [True, False]
        (name, index), *others = served.app.residents.indexes()
        assert (name, others) == (MODEL, [])
        assert index.expected or index.blocks


async def test_a_prompt_that_its_worker_cuts_is_not_scored(work: Work) -> None:
    async with serving(SimOptions(), policy="prefix") as served:
        await eventually(lambda: subscriptions(served) == [True])
        work.taken()
        for request in (tokenized("word " * 40), engine.GenerateRequest(text="word " * 40)):
            request.sampling_params.truncate_prompt_tokens = 20
            await served.route(request)
        assert not any(work.taken().values())


@pytest.mark.parametrize("credit", [-1.0, float("nan"), float("inf")])
async def test_a_credit_that_is_no_share_is_refused(credit: float) -> None:
    async with serving(SimOptions(), policy="prefix") as served:
        refused = await served.refusal(with_credit(tokenized("x"), credit))
        assert refused.reason == "INVALID_REQUEST"


# -- How long a prompt is that the router does not expand


@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "prefix"])
async def test_referred_pictures_count_with_the_tokens_they_become(policy: str) -> None:
    slow = SimOptions(faults=("hang",))
    _, picture = cv2.imencode(".png", np.zeros((512, 512, 3), np.uint8))
    async with (
        running() as host,
        serving(
            slow, policy=policy, mm_processing="worker", media_allow_private_hosts=True
        ) as served,
    ):
        names = [f"/{n}.png" for n in range(4)]
        for name in names:
            host.routes[name] = fixed(picture.tobytes())
        request = seeing(PICTURE * 4, *map(host.url, names))
        words = 34 - len(request.tokenized.input_ids)
        request.tokenized.input_ids.extend([65] * words)
        call = served.stub.Generate(request, timeout=15)
        await eventually(lambda: served.worker().load.in_flight)
        assert served.worker().load.reserved_tokens == 30 + 4 * 256
        call.cancel()
        await served.at_rest()


async def test_a_host_that_does_not_answer_costs_a_moment_and_the_typical_size() -> None:
    async with (
        running() as host,
        serving(
            SimOptions(),
            policy="least_load",
            mm_processing="worker",
            media_allow_private_hosts=True,
        ) as served,
    ):
        host.routes["/gone.png"] = fixed(status="404 Not Found")
        refused = await served.refusal(seeing(PICTURE, host.url("/gone.png")))
        assert "answered 404" in refused.message
        assert refused.route["attempts"] == "1", "it is the worker that says so"
        # 1280x720 in patches of 16, merged two by two, and the tokens around it.
        shown = await served.admin.Explain(
            admin.ExplainRequest(request=seeing(PICTURE, host.url("/gone.png"))), timeout=10
        )
        assert shown.estimated_tokens == 40 * 22 + 2
        assert ranged(host) == 1, "it is not asked again so soon"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_context": 100}, "PROMPT_TOO_LONG"),
        ({"encoder_budget": 100}, "MEDIA_ITEM_OVER_ENCODER_BUDGET"),
    ],
)
async def test_no_picture_is_decoded_for_a_request_that_its_header_makes_too_large(
    limits: dict[str, Any], reason: str
) -> None:
    async with serving(SimOptions(mm_processor="", **limits)) as served:
        refused = await served.refusal(seeing(PICTURE, data_url("photo_640x480.jpg")))
        assert refused.reason == reason
        assert decodes(served) == 0
        await served.say(seeing(PICTURE, data_url("tiny_20x30.png")))
        assert decodes(served) == 1


async def test_no_picture_is_decoded_for_a_request_that_is_too_large_for_every_pair() -> None:
    limits: dict[str, Any] = {"mm_processor": "", "max_context": 100}
    prefill = prefilling(kv_role="kv_producer", **limits)
    async with serving(prefill, decoding(kv_role="kv_consumer", **limits)) as served:
        refused = await served.refusal(seeing(PICTURE, data_url("photo_640x480.jpg")))
        assert (refused.reason, refused.about["leg"]) == ("PROMPT_TOO_LONG", "prefill")
        assert decodes(served) == 0


async def test_prompt_logprobs_of_pictures_need_one_worker_alone() -> None:
    limits: dict[str, Any] = {"mm_processor": ""}
    prefill = prefilling(kv_role="kv_producer", encoder_budget=10, **limits)
    async with serving(prefill, decoding(kv_role="kv_consumer", **limits)) as served:
        asked = seeing(PICTURE, data_url("photo_640x480.jpg"), prompt_logprobs=1)
        assert (await served.route(asked))["worker"] == served.workers[1].address
