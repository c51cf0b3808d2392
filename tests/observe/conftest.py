import io
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from router.observe import logging as router_logging
from router.observe.logging import configure, set_level


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
