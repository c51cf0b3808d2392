import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.units import format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5s", 5.0),
        ("250ms", 0.25),
        ("10us", 1e-5),
        ("1m30s", 90.0),
        ("2h", 7200.0),
        ("1.5s", 1.5),
        ("30", 30.0),
        (" 5S ", 5.0),
        (0, 0.0),
        (2.5, 2.5),
    ],
)
def test_durations_are_read(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "soon",
            "-1s",
            "5 s",
            "5d",
            "s",
            "1s2",
            "1e3",
            "nan",
            "inf",
            "9" * 400,
            "9" * 400 + "s",
            "9999999h",
        ),
        *(-1, -0.5, math.inf, math.nan, True, None, [1]),
    ],
)
def test_what_is_no_duration_is_refused(text: Any) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("1GB", 10**9),
        ("1.5KiB", 1536),
        ("2 gib", 2 << 30),
        ("7b", 7),
        (12, 12),
    ],
)
def test_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "big", "-1", "1TBX", "MiB", "1,5MiB", -1])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.25, "250ms"),
        (5, "5s"),
        (90, "90s"),
        (120, "2m"),
        (7200, "2h"),
        (1e6, "1000000s"),
    ],
)
def test_durations_are_written_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e9, allow_subnormal=False))
def test_a_written_duration_reads_back_the_same(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-12)


@given(st.integers(min_value=0, max_value=2**63))
def test_a_written_size_reads_back_the_same(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes
