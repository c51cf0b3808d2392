"""What all tests need done before the first of them, and what some of any room need."""

from __future__ import annotations

import asyncio
import io
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

import hypothesis
import pytest
import structlog
import uvloop

from router import kernels
from router.observe import logging as router_logging
from router.observe.logging import configure, set_level

# No example is wrong for being slow: this machine may have others to serve.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that `mmrouter serve` runs on."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles the kernels, of which a fresh checkout has none.

    A router is not ready before, and no test has that much patience: on a busy machine it
    takes minutes. Here no test's own time limit runs.
    """
    if session.items and not session.config.option.collectonly and not kernels.are_cached():
        subprocess.run([sys.executable, "-m", "router.kernels"], check=True)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What is logged as JSON from here on."""
    before = structlog.get_config()
    root = logging.getLogger()
    handlers, level, threshold = root.handlers, root.level, router_logging.level()
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure("json", "debug")
    # Loggers of modules must not keep this stream.
    structlog.configure(cache_logger_on_first_use=False)
    yield stream
    structlog.configure(**before)
    set_level(threshold)
    root.handlers = handlers
    root.setLevel(level)
