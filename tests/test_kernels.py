"""Compiling apart: not when it is done already, never past a stop, and never in the way."""

from __future__ import annotations

import asyncio
import io
import subprocess
from pathlib import Path

import pytest

from router import kernels
from tests.serving import eventually

_start = subprocess.Popen


class Apart:
    """Stands for the compiling process: runs another program, and remembers it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *program: str) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self._program = program
        monkeypatch.setattr(kernels.subprocess, "Popen", self._run)

    def _run(self, *_: object, **__: object) -> subprocess.Popen[bytes]:
        process = _start(self._program)
        self.started.append(process)
        return process


async def test_a_filled_cache_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marker = tmp_path / "filled"
    marker.touch()
    monkeypatch.setattr(kernels, "_marker", lambda: marker)
    apart = Apart(monkeypatch, "false")
    await kernels.compile_apart(asyncio.Event())
    assert apart.started == []


async def test_where_no_process_can_be_started_the_router_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logged: io.StringIO
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(kernels, "_marker", lambda: tmp_path / "filled")
    monkeypatch.setattr(kernels.subprocess, "Popen", refused)
    await kernels.compile_apart(asyncio.Event())
    assert "kernels_not_cached" in logged.getvalue()


async def test_an_empty_cache_is_filled_by_another_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marker = tmp_path / "filled"
    monkeypatch.setattr(kernels, "_marker", lambda: marker)
    apart = Apart(monkeypatch, "touch", str(marker))
    await kernels.compile_apart(asyncio.Event())
    assert kernels.are_cached()
    assert [process.returncode for process in apart.started] == [0]


async def test_a_failure_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "are_cached", lambda: False)
    Apart(monkeypatch, "false")
    await kernels.compile_apart(asyncio.Event())
    assert "kernels_not_cached" in "".join(capsys.readouterr())


async def test_a_stop_ends_the_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "are_cached", lambda: False)
    apart = Apart(monkeypatch, "sleep", "60")
    stop = asyncio.Event()
    compiling = asyncio.create_task(kernels.compile_apart(stop))
    await eventually(lambda: apart.started)
    stop.set()
    await asyncio.wait_for(compiling, 10)
    assert apart.started[0].returncode == -9


def test_the_marker_changes_with_the_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = kernels._version()
    assert before == kernels._version()
    room = tmp_path / "vision" / "backend"
    room.mkdir(parents=True)
    (room / "loops.py").write_text("# another loop")
    monkeypatch.setattr(kernels.cpu, "__file__", str(room / "cpu.py"))
    assert kernels._version() != before
