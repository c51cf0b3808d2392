"""scripts/demo as a newcomer runs it."""

import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from tests.serving import PATIENCE

# Three commands start here, and the kernels may have to be compiled.
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "scripts" / "demo")


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A variable's value by which the demo's processes can be told from all others."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("DEMO_TEST_MARK", value)
    return value


def processes_with(mark: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:  # not ours, or gone by now
            continue
        if f"DEMO_TEST_MARK={mark}".encode() in environment and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


def all_have_ended(mark: str) -> bool:
    """Whether they all end: one that was killed may be there for a moment yet."""
    until = time.monotonic() + PATIENCE
    while processes_with(mark):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_one_photo_gets_the_same_answer_both_ways(mark: str) -> None:
    demo = subprocess.run([DEMO], capture_output=True, text=True, timeout=550, check=False)
    assert demo.returncode == 0, demo.stderr
    assert "processed in the router (auto_none)" in demo.stdout
    assert "processed in the worker (auto_uniform)" in demo.stdout
    assert "640x480" in demo.stdout
    assert demo.stdout.endswith("The same answer, token for token.\n")
    assert all_have_ended(mark)


def test_serving_ends_with_everything_it_started(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMROUTER_LISTEN", f"unix:{tmp_path}/router")
    monkeypatch.setenv("MMROUTER_HTTP", "")
    with subprocess.Popen([DEMO, "--serve"], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert "is up" in demo.stdout.readline()
        assert len(processes_with(mark)) >= 4, "the script, two workers and a router"
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(timeout=60) == 143
    assert all_have_ended(mark)


def test_an_unknown_argument_is_a_usage_error() -> None:
    demo = subprocess.run([DEMO, "--fast"], capture_output=True, text=True, timeout=60, check=False)
    assert demo.returncode == 2
    assert "usage" in demo.stderr
