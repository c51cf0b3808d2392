from pathlib import Path

import pytest

from router.cli import run
from router.wire import admin
from tests.cli.servers import Admin, Engine, complete, serving


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    return str(path)


def test_every_call_carries_the_token(token: str) -> None:
    engine, desk = Engine([complete(b"ok")]), Admin(admin.ExplainResponse())
    with serving(engine, desk) as address:
        for command in ("generate", "explain"):
            assert run([command, "--addr", address, "--token-file", token, "hi"]) == 0
        desk.answer = admin.ListWorkersResponse()
        assert run(["workers", "list", "--addr", address, "--token-file", token]) == 0
    assert engine.authorization == ["Bearer s3cret"] * 5
    assert desk.authorization == ["Bearer s3cret"] * 2


def test_explain_takes_a_token_of_its_own_for_the_admin_service(token: str, tmp_path: Path) -> None:
    other = tmp_path / "admin"
    other.write_text("0ther")
    engine, desk = Engine(), Admin(admin.ExplainResponse())
    with serving(engine, desk) as address:
        tokens = ["--token-file", token, "--admin-token-file", str(other)]
        assert run(["explain", "--addr", address, *tokens, "hi"]) == 0
    assert set(engine.authorization) == {"Bearer s3cret"}
    assert desk.authorization == ["Bearer 0ther"]


def test_without_the_flag_nothing_is_sent() -> None:
    engine = Engine([complete(b"ok")])
    with serving(engine) as address:
        assert run(["generate", "--addr", address, "hi"]) == 0
    assert engine.authorization == [""] * 3


@pytest.mark.parametrize("content", [None, "", "two words", "a\nb", "\u00e9"])
def test_a_file_that_holds_no_token_is_a_usage_error(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    assert run(["workers", "list", "--token-file", str(path)]) == 2
    assert "token" in capsys.readouterr().err
