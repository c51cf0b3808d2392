"""Plain text tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

# Longer cells would push the others off the screen.
_WIDEST = 200


def clean(text: str) -> str:
    """One line that moves no cursor and changes no colour, whoever has written it."""
    kept = text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in kept)


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns two spaces apart; a cell without text is a dash.

    Cells are cleaned: workers have a say in what they hold.
    """
    lines = [list(header), *([clean(cell) or "-" for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)
