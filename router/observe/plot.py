"""Small plots as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 240, 48
_PAD = 2


def sparkline(title: str, values: Sequence[float], length: int) -> str:
    """The newest of `length` values at the right edge, on a scale from 0 to the largest."""
    top = max(values, default=0.0) or 1.0
    step = WIDTH / max(1, length - 1)
    left = WIDTH - step * (len(values) - 1)
    points = [
        (left + step * i, HEIGHT - _PAD - (HEIGHT - 2 * _PAD) * max(0.0, value) / top)
        for i, value in enumerate(values)
    ]
    drawn = ""
    if points:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        area = f"{points[0][0]:.1f},{HEIGHT} {line} {points[-1][0]:.1f},{HEIGHT}"
        drawn = f'<polygon class="area" points="{area}"/><polyline class="line" points="{line}"/>'
    now, most = (short(values[-1]), short(max(values))) if values else ("–", "–")
    label = escape(f"{title}: {now} now, at most {most}")
    return (
        f"<figure><figcaption>{escape(title)}<b>{now}</b></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}"><line class="base" x1="0" y1="{HEIGHT - 1}" x2="{WIDTH}" '
        f'y2="{HEIGHT - 1}"/>{drawn}</svg><small>at most {most}</small></figure>'
    )


def short(value: float) -> str:
    """Three figures and a unit: `0`, `0.25`, `42`, `1.5k`, `3.2M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    if value >= 10 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.2f}"
