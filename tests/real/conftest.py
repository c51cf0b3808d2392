"""The stack of real processes, where the environment for it has been made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.media_host import MediaHost
from tests.real.stack import HOME, KINDS, SCRIPTS, Router, Stack, Worker

# Pictures come from the loopback host of the tests, and each test says who processes them.
FLAGS = ("--media-allow-private-hosts", "--allow-mm-override", "--mm-processing", "router")


@pytest.fixture(scope="session")
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    if not (HOME / "ready").is_file():
        pytest.skip(f"no real worker here: {SCRIPTS / 'setup.sh'} has not made {HOME}")
    running = Stack(tmp_path_factory.mktemp("logs"))
    try:
        # Side by side, rather than each when the first test asks for it.
        asked = {name for item in request.session.items for name in fixtures_of(item)}
        running.workers(*(kind for kind in KINDS if f"{kind}_worker" in asked))
        yield running
    finally:
        running.close()


def fixtures_of(item: pytest.Item) -> list[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else []


@pytest.fixture(scope="session")
def media_host() -> Iterator[MediaHost]:
    with MediaHost() as host:
        yield host


@pytest.fixture
def refs_worker(stack: Stack) -> Worker:
    """Takes references, wants raw pixels, reports its cache."""
    return stack.worker("refs")


@pytest.fixture
def tensors_worker(stack: Stack) -> Worker:
    """Takes tensors only, wants raw pixels."""
    return stack.worker("tensors")


@pytest.fixture
def floats_worker(stack: Stack) -> Worker:
    """Takes references, wants normalised floats."""
    return stack.worker("floats")


def router_for(stack: Stack, *workers: Worker, flags: tuple[str, ...] = FLAGS) -> Router:
    """A router in front of these workers."""
    places = [part for worker in workers for part in ("--worker", worker.address)]
    return stack.router(*places, *flags)
