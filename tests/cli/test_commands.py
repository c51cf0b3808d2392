import subprocess
import sys
from importlib.metadata import version

import pytest

from router.cli import COMMANDS, run


def mmrouter(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in text
        assert command.summary in text


def test_version_is_the_distribution_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"mmrouter {version('mmrouter')}\n"


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "hint"), [("helth", "did you mean 'health'?"), ("zzz", "choose from serve")]
)
def test_unknown_command_gets_a_hint(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([typed]) == 2
    assert hint in capsys.readouterr().err


def test_unknown_flag_before_the_command_is_a_usage_error() -> None:
    assert run(["--nonsense", "health"]) == 2


@pytest.mark.parametrize(
    ("typed", "code", "hint"),
    [
        (("serve", "--polcy=prefix"), 2, "arguments: --polcy=prefix; did you mean --policy?\n"),
        (("workers", "list", "--josn"), 2, "arguments: --josn; did you mean --json?\n"),
        (("health", "--adr", "h:1"), 1, "arguments: --adr h:1; did you mean --addr?\n"),
        (("sim", "--zzz"), 2, "mmrouter sim: error: unrecognized arguments: --zzz\n"),
    ],
)
def test_an_unknown_flag_gets_a_hint_and_no_page_of_help(
    typed: tuple[str, ...], code: int, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(typed) == code
    told = capsys.readouterr().err
    assert told.endswith(hint)
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        ["health", "--connect-timeout", "abc"],
        ["workers", "list", "--timeout", "abc"],
        ["generate", "--timeout", "abc", "x"],
        ["explain", "--timeout", "abc", "x"],
        ["log-level", "--timeout", "abc"],
        ["sim", "--grace", "abc"],
    ],
    ids=lambda command: command[0],
)
def test_what_is_no_duration_is_told_how_to_write_one(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) in (1, 2)
    assert "not a duration: 'abc' (write 250ms, 5s, 1m30s or 2h)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["serve", "--mm-processing", "everywhere"], ["sim", "--style", "baroque"]]
)
def test_a_wrong_choice_is_told_without_a_page_of_flags(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command) == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == f"usage: mmrouter {command[0]} [FLAG…]"
    assert command[-1] in error


def test_a_command_s_help_exits_with_zero() -> None:
    assert run(["health", "--help"]) == 0


def test_python_m_router_is_the_command() -> None:
    result = mmrouter("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("mmrouter ")


def test_only_the_chosen_command_is_imported() -> None:
    code = """
import sys
from router.cli import run
assert run(["health", "--help"]) == 0
loaded = {name.partition(".")[0] for name in sys.modules}
heavy = loaded & {"numpy", "cv2", "pydantic", "numba", "aiohttp", "PIL", "tokenizers", "jinja2"}
commands = {m for m in sys.modules if m.startswith("router.cli.")}
assert not heavy, heavy
used = {"health", "connection", "values"}
assert commands == {f"router.cli.{name}" for name in used}, commands
assert "router.wire" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_signal_before_the_router_listens_ends_it_in_peace() -> None:
    script = """
import argparse, os, signal, time
from router import config
from router.cli import serve

def load(flags, file):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

config.load = load
parser = argparse.ArgumentParser()
config.add_flags(parser)
serve.run(argparse.Namespace(config=None, **vars(parser.parse_args([]))))
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert ended.returncode == 0
