"""How many checks in a row make a judgement."""

from __future__ import annotations

from router.fleet.health import Streaks


def test_failures_count_in_a_row_only() -> None:
    streaks = Streaks(failures=3, successes=1)
    assert [streaks.bad(), streaks.bad()] == [False, False]
    streaks.good()
    assert [streaks.bad(), streaks.bad(), streaks.bad(), streaks.bad()] == [
        False,
        False,
        True,
        True,
    ]


def test_a_recovery_takes_as_many_good_checks_as_it_should() -> None:
    streaks = Streaks(failures=1, successes=2)
    assert streaks.bad()
    assert not streaks.good()
    streaks.bad()
    assert not streaks.good()
    assert streaks.good()
