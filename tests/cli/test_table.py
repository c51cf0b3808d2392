"""Tables for a terminal, of words that others have chosen."""

from __future__ import annotations

from router.cli.table import render


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert render(("A", "BB"), [("xyz", ""), ("", "1")]) == "A    BB\nxyz  -\n-    1"


def test_a_cell_is_one_short_line_without_control_over_the_terminal() -> None:
    table = render(("A", "B"), [("\x1b[31mred\nforged", "x" * 5000)])
    _, line = table.split("\n")
    assert line.startswith("\ufffd[31mred\ufffdforged  x")
    assert line.isprintable()
    assert line.endswith("x…")
    assert len(line) < 250
