import pytest

from router.cli import run
from router.wire import admin
from tests.cli.servers import Admin, serving


def ask(answer: admin.SetLogLevelResponse, *args: str) -> tuple[int, Admin]:
    server = Admin(answer)
    with serving(server) as address:
        return run(["log-level", "--addr", address, *args]), server


def test_a_level_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    changed = admin.SetLogLevelResponse(level=admin.DEBUG, before=admin.INFO)
    code, server = ask(changed, "debug")
    assert (code, capsys.readouterr().out) == (0, "debug (was info)\n")
    assert server.requests == [admin.SetLogLevelRequest(level=admin.DEBUG)]


def test_without_a_level_it_is_only_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, server = ask(admin.SetLogLevelResponse(level=admin.INFO, before=admin.INFO))
    assert (code, capsys.readouterr().out) == (0, "info\n")
    assert server.requests == [admin.SetLogLevelRequest()]


def test_an_unknown_level_is_a_usage_error() -> None:
    assert run(["log-level", "loud"]) == 2
