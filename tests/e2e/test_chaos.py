"""scripts/bench/chaos.py, for as long as a test may take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "scripts" / "bench" / "chaos.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("migration", [(), ("--migration",)], ids=["", "migration"])
def test_nothing_is_lost_or_left_over_while_workers_come_and_go(migration: tuple[str, ...]) -> None:
    run = subprocess.run(
        [sys.executable, str(CHAOS), "--seconds", "30", "--clients", "8", *migration],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
