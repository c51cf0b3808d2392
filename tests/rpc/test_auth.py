"""Files of bearer tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.rpc.auth import TokenFile


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_tokens_are_read_again_as_the_file_changes(tmp_path: Path) -> None:
    file, clock = tmp_path / "tokens", Clock()
    file.write_text("old\n")
    tokens = TokenFile(file, clock)
    assert tokens.admits("old")
    file.write_text("new\n")
    clock.now = 2.0
    assert tokens.admits("new")
    assert not tokens.admits("old")


@pytest.mark.parametrize("broken", [None, "", "\n# nobody\n", "three\nBearer four\n", "t\u00f6k\n"])
def test_a_file_without_a_token_leaves_those_that_were(tmp_path: Path, broken: str | None) -> None:
    file, clock = tmp_path / "tokens", Clock()
    file.write_text("one\ntwo\n")
    tokens = TokenFile(file, clock)
    if broken is None:
        file.unlink()
    else:
        file.write_text(broken)
    clock.now = 2.0
    assert tokens.admits("one")
    assert tokens.admits("two")
    assert not tokens.admits("")


def test_a_line_that_is_no_token_is_told_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# of last year\nfine\nvery secret\n")
    with pytest.raises(ValueError, match=r"tokens holds no token in line 3$"):
        TokenFile(file)


def test_the_tokens_themselves_are_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("very-secret\n")
    assert "very-secret" not in repr(vars(TokenFile(file)))
