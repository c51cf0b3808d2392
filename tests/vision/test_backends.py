"""The CUDA backend on numba's simulator, and the choice of a backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.vision.backend import cuda
from router.vision.backend.choose import choose_backend

ROOT = Path(__file__).parents[2]


def test_the_simulated_device_gives_the_cpus_bits_and_fails_over() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.vision.cuda_simulated"],
        cwd=ROOT,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip().endswith("equal")
    # A failure is told once for each rest, however many draws follow, and the end of it too.
    told = result.stdout + result.stderr
    assert (told.count("cuda_failed"), told.count("cuda_again")) == (5, 1)


def test_without_a_device_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_present", lambda: False)
    assert choose_backend("auto").name == "cpu"
    assert choose_backend("cpu").name == "cpu"
    with pytest.raises(ValueError, match="no CUDA device"):
        choose_backend("cuda")


def test_with_a_device_auto_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_present", lambda: True)
    assert choose_backend("auto").name == "cuda"
