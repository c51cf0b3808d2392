"""What a process hears is what its supervisor has told."""

from __future__ import annotations

import pytest

from router import config
from router.supervise.place import Place, heard, told


def test_settings_and_place_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMROUTER_DRAIN_TIMEOUT", "7s")
    given = {
        "worker": "a:1,grpc://b:2",
        "media_max_bytes": "3MiB",
        "image_max_input_bytes": "1MiB",
        "worker_wait": "250ms",
        "processes": "3",
        "mm_processing": "worker",
    }
    settings = config.load(given)
    place = Place(2, 3, "/run/x", replacement=True)
    monkeypatch.setenv("MMROUTER_DRAIN_TIMEOUT", "9s")
    monkeypatch.setenv("MMROUTER_WORKER_WAIT", "9s")
    assert heard(told(place, settings)) == (place, settings)


def test_places_meet_in_one_folder() -> None:
    place = Place(1, 3, "/run/x")
    assert place.siblings == [0, 2]
    assert place.grpc(2) == Place(2, 3, "/run/x").grpc(2) != place.grpc(1)
