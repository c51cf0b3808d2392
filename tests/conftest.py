"""What all tests need done before the first of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from router import kernels


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles the kernels, of which a fresh checkout has none.

    A router is not ready before, and no test has that much patience: on a busy machine it
    takes minutes. Here no test's own time limit runs.
    """
    if session.items and not session.config.option.collectonly and not kernels.are_cached():
        subprocess.run([sys.executable, "-m", "router.kernels"], check=True)
