"""The first steps of a request: which model is meant."""

from __future__ import annotations

import pytest

from router.request.decide import _some


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a"], "a"),
        (list("abcdefgh"), "a, b, c, d, e, f, g, h"),
        (list("abcdefghi"), "a, b, c, d, e, f, g, h ..."),
        (["x" * 500], "x" * 200 + " ..."),
    ],
)
def test_an_error_names_a_bounded_number_of_models(names: list[str], told: str) -> None:
    assert _some(names) == told
