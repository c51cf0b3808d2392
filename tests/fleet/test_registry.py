"""What the registry says of models follows every change of the fleet at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.fleet.endpoint import Endpoint, Role
from router.fleet.registry import Registry
from router.fleet.worker import Worker
from router.observe.metrics import Metrics
from router.wire import engine
from tests.fleet.stand_in import CAPABILITY


@pytest.fixture
def registry() -> Registry:
    return Registry(Metrics())


def read(worker: Worker, model: str) -> None:
    """As if the worker's metadata had been read, and named this model."""
    capability = replace(CAPABILITY, served_name=model)
    worker.learn(capability, None, engine.GetModelInfoResponse(), engine.GetServerInfoResponse())


async def test_workers_are_of_a_model_once_they_were_read(registry: Registry) -> None:
    first = registry.add(Endpoint("127.0.0.1:1", Role.BOTH))
    second = registry.add(Endpoint("127.0.0.1:2", Role.BOTH))
    assert (list(registry.model_names), registry.unreadable) == ([], 2)
    read(first, "b")
    assert (list(registry.model_names), registry.unreadable) == (["b"], 1)
    read(second, "a")
    assert (list(registry.model_names), registry.unreadable) == (["a", "b"], 0)
    assert list(registry.of_model("a")) == [second]
    read(second, "b")
    assert list(registry.model_names) == ["b"]
    assert list(registry.of_model("b")) == [first, second]
    assert list(registry.of_model("a")) == []


async def test_the_workers_of_a_model_are_one_object_until_something_changes(
    registry: Registry,
) -> None:
    worker = registry.add(Endpoint("127.0.0.1:1", Role.BOTH))
    read(worker, "a")
    before = registry.of_model("a")
    assert registry.of_model("a") is before
    read(worker, "a")
    assert registry.of_model("a") is not before


async def test_a_worker_that_is_removed_is_gone_for_whoever_looks_while_it_goes(
    registry: Registry,
) -> None:
    worker = registry.add(Endpoint("127.0.0.1:1", Role.BOTH))
    read(worker, "a")
    # Looks at the moment when it is told, which is before the removal is complete.
    registry.listen(lambda: registry.of_model("a") and None)
    registry.remove(worker, "a test")
    assert list(registry.of_model("a")) == []
    assert list(registry.model_names) == []
