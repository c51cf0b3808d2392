"""As many threads as cores, and no more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.media import pool


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("9900000 100000", 8),
        ("nonsense", 8),
    ],
)
def test_the_cgroups_quota_bounds_the_threads(
    text: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    monkeypatch.setattr(pool, "_CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert pool.cores() == expected


def test_without_a_cgroup_the_affinity_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_CPU_MAX", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3})
    assert pool.cores() == 2
