from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workers.vllm.versions import EnvironmentUnfit, installed, judge, parse

PYTHON = Path("/opt/vllm/bin/python")
GOOD = {"vllm": "0.32.0", "smg-grpc-servicer": "0.14.1", "smg-grpc-proto": "0.4.28"}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.32.0", (0, 32, 0)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("0.33rc1", (0, 33)),
        ("v0.28.1.dev7+gabc", (0, 28, 1)),
        ("unknown", ()),
    ],
)
def test_a_version_is_its_leading_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse(text) == numbers


def test_the_tried_releases_pass() -> None:
    for vllm in ("0.28.0", "0.30.1", "0.32.0+cpu", "0.32.9"):
        assert judge(GOOD | {"vllm": vllm}, PYTHON) == judge(GOOD, PYTHON)
    assert judge(GOOD, PYTHON).problems == judge(GOOD, PYTHON).doubts == ()


@pytest.mark.parametrize(
    ("name", "version"),
    [("vllm", "0.27.1"), ("smg-grpc-servicer", "0.13.6"), ("smg-grpc-proto", "0.4.26")],
)
def test_an_older_release_is_a_problem_that_says_what_to_install(name: str, version: str) -> None:
    (problem,) = judge(GOOD | {name: version}, PYTHON).problems
    assert f"{name} {version}" in problem
    assert "pip install" in problem


def test_a_missing_one_is_a_problem() -> None:
    (problem,) = judge({k: v for k, v in GOOD.items() if k != "vllm"}, PYTHON).problems
    assert problem.startswith(f"{PYTHON} has no vllm; install it there")


@pytest.mark.parametrize(
    ("name", "version"), [("vllm", "0.33.0"), ("vllm", "1.0"), ("smg-grpc-proto", "0.5.0")]
)
def test_a_newer_release_is_only_a_doubt(name: str, version: str) -> None:
    verdict = judge(GOOD | {name: version}, PYTHON)
    assert verdict.problems == ()
    (doubt,) = verdict.doubts
    assert f"{name} {version} is newer" in doubt


def test_another_interpreter_is_asked_for_its_own_packages() -> None:
    assert installed(Path(sys.executable)).get("vllm") is None


def test_what_is_no_interpreter_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfit, match="not a Python interpreter"):
        installed(tmp_path / "python")
    with pytest.raises(EnvironmentUnfit, match="not a Python interpreter"):
        installed(Path("/bin/true"))
