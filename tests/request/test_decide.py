"""The first steps of a request: which model is meant."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from router.fleet.endpoint import Endpoint
from router.fleet.registry import Registry
from router.fleet.worker import Worker
from router.observe.metrics import Metrics
from router.policy.models import Policies
from router.policy.registry import make_policy
from router.policy.settings import PolicySettings
from router.request.decide import Decider, DecideSettings, _some
from router.request.record import Record
from router.wire import engine
from tests.fleet.stand_in import CAPABILITY


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a"], "a"),
        (list("abcdefgh"), "a, b, c, d, e, f, g, h"),
        (list("abcdefghi"), "a, b, c, d, e, f, g, h ..."),
        (["x" * 500], "x" * 200 + " ..."),
    ],
)
def test_an_error_names_a_bounded_number_of_models(names: list[str], told: str) -> None:
    assert _some(names) == told


def registered(registry: Registry, address: str, model: str) -> Worker:
    """A worker of a model, as one that has been asked."""
    worker = registry.add(Endpoint(address))
    capability = replace(CAPABILITY, served_name=model)
    worker.learn(capability, None, engine.GetModelInfoResponse(), engine.GetServerInfoResponse())
    return worker


async def test_workers_that_are_gone_are_not_kept_for_the_sake_of_their_model() -> None:
    registry = Registry(Metrics())
    policies = Policies(PolicySettings(), lambda _, settings: make_policy(settings))
    decider = Decider(registry, policies, DecideSettings())
    former = registered(registry, "127.0.0.1:1", "former")
    registered(registry, "127.0.0.1:2", "present")
    request = engine.GenerateRequest(text="x")
    for model in ("former", "present"):
        decider.decide(request, model, Record("a"))
    registry.remove(former, "it goes")
    decider.decide(request, "present", Record("a"))
    gone = weakref.ref(former)
    del former
    gc.collect()
    assert gone() is None
