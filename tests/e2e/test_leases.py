"""A place at a worker is given back, even where a mistake of ours comes after it was taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from router.policy.round_robin import RoundRobin
from tests.e2e.pairs import decoding, prefilling
from tests.serving import MODEL, PICTURE, Serving, data_url, seeing, serving, tokenized
from workers.sim import SimOptions


def mistaken(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a mistake of ours")


def in_choosing(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundRobin, "reserved", mistaken)


def in_watching(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.app.dispatcher, "_watch", mistaken)


@pytest.mark.parametrize(
    ("workers", "settings", "mistake"),
    [
        ([SimOptions()], {}, in_choosing),
        ([prefilling(kv_role="kv_producer"), decoding(kv_role="kv_consumer")], {}, in_choosing),
        ([SimOptions()], {"policy": "prefix", "mm_processing": "worker"}, in_watching),
    ],
    ids=["choice", "pair", "watch"],
)
async def test_a_mistake_after_the_reservation_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
    workers: list[SimOptions],
    settings: dict[str, Any],
    mistake: Callable[[Serving, pytest.MonkeyPatch], None],
) -> None:
    async with serving(*workers, **settings) as served:
        picture = "mm_processing" in settings
        request = seeing(PICTURE, data_url("solid_61x43.bmp")) if picture else tokenized("x")
        with monkeypatch.context() as context:
            mistake(served, context)
            assert (await served.refusal(request)).reason == "INTERNAL"
        await served.at_rest()
        assert served.app.policies.of(MODEL)
        await served.generate(request)
