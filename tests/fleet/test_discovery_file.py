"""Workers listed in a file that changes, breaks and comes back."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from unittest.mock import Mock

import pytest

from router.fleet.discovery import file as file_discovery
from router.fleet.discovery.file import FileDiscovery, parse
from router.fleet.endpoint import Endpoint, Role
from tests.serving import eventually

FULL = b"""
[[workers]]
address = "grpc://10.0.0.1:50051"
role = "prefill"
model = "org/model"
labels = { zone = "a", rack = 7 }

[[workers]]
address = "[fd00::1]:50051"
"""


def listing(*addresses: str) -> str:
    return (
        "workers = []"
        if not addresses
        else "\n".join(f'[[workers]]\naddress = "{address}"' for address in addresses)
    )


def test_every_field_is_read() -> None:
    assert parse(FULL) == [
        Endpoint("10.0.0.1:50051", Role.PREFILL, "org/model", {"zone": "a", "rack": "7"}),
        Endpoint("[fd00::1]:50051"),
    ]


def test_json_says_the_same() -> None:
    document = {"workers": [{"address": "a:1", "role": "decode", "labels": {"x": "y"}}]}
    assert parse(json.dumps(document).encode(), is_json=True) == [
        Endpoint("a:1", Role.DECODE, labels={"x": "y"})
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no list of workers"),
        (b"workers = 3", "no list of workers"),
        (b"[[workers]]\naddress = ", "Invalid value"),
        (b"[[workers]]", "workers[0]: address is missing"),
        (b'[[workers]]\naddress = "host"', "workers[0]: not a worker's address"),
        (b'[[workers]]\naddress = "a:1"\nrole = "chef"', "workers[0]: not a role: 'chef'"),
        (b'[[workers]]\naddress = "a:1"\nmodle = "x"', "workers[0]: unknown key: modle"),
        (b'[[workers]]\naddress = "a:1"\nlabels = 1', "workers[0]: labels is not a table"),
        (b'[[workers]]\naddress = "a:1"\n[[workers]]\naddress = "a:1"', "a:1 is listed twice"),
        (b"workers = [3]", "workers[0]: not a table"),
        (b"\xff\xfe", "can't decode"),
        (b"workers = " + b"[" * 10_000, "nested too deeply"),
        (b'[[workers]]\naddress = "h\\u0000:1"', "workers[0]: not a worker's address"),
    ],
)
def test_a_broken_file_says_what_is_wrong_where(content: bytes, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(content)
    assert said in str(refused.value)


def test_an_empty_fleet_is_written_down() -> None:
    assert parse(b"workers = []") == []


class Follower:
    """Reads a discovery's sets one by one."""

    def __init__(self, sets: AsyncIterator[Sequence[Endpoint]]) -> None:
        self._sets = sets

    async def next(self) -> list[str]:
        async with asyncio.timeout(10):
            return [endpoint.address for endpoint in await anext(self._sets)]


async def test_changes_are_followed_and_a_broken_file_keeps_the_last_good_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Mock()
    monkeypatch.setattr(file_discovery, "_log", log)
    file = tmp_path / "workers.toml"
    file.write_text(listing("a:1"))
    async with aclosing(FileDiscovery(file, interval=0.01).sets()) as sets:
        follower = Follower(sets)
        assert await follower.next() == ["a:1"]
        broken = asyncio.create_task(follower.next())
        file.write_text("[[workers]]\naddress = ")
        await eventually(lambda: log.error.called)
        assert log.error.call_args.args == ("discovery_file_broken",)
        assert not broken.done()
        file.write_text(listing("a:1", "b:1"))
        assert await broken == ["a:1", "b:1"]


async def test_a_file_that_comes_later_is_read_when_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "workers.toml"
    async with aclosing(FileDiscovery(file, interval=0.01).sets()) as sets:
        first = asyncio.create_task(Follower(sets).next())
        await asyncio.sleep(0)
        file.write_text(listing("a:1"))
        assert await first == ["a:1"]


async def test_what_is_no_file_breaks_as_a_broken_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Mock()
    monkeypatch.setattr(file_discovery, "_log", log)
    monkeypatch.setattr(file_discovery, "_MAX_BYTES", 1000)
    file = tmp_path / "workers.toml"

    def told() -> list[str]:
        return [call.kwargs["why"] for call in log.error.call_args_list]

    os.mkfifo(file)
    async with aclosing(FileDiscovery(file, interval=0.01).sets()) as sets:
        first = asyncio.create_task(Follower(sets).next())
        await eventually(lambda: told() == ["it is not a regular file"])
        file.unlink()
        file.mkdir()
        await eventually(lambda: len(told()) > 1 and told()[-1] == "Is a directory")
        file.rmdir()
        file.write_bytes(b"#" * 1001)
        await eventually(lambda: told()[-1] == "it has more than 1000 bytes")
        assert not first.done()
        file.write_text(listing("a:1"))
        assert await first == ["a:1"]


async def test_a_linked_file_is_followed_as_in_a_config_map(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "workers.toml").write_text(listing(f"{name}:1"))
    data, file = tmp_path / "data", tmp_path / "workers.toml"
    data.symlink_to("one")
    file.symlink_to("data/workers.toml")
    async with aclosing(FileDiscovery(file, interval=0.01).sets()) as sets:
        follower = Follower(sets)
        assert await follower.next() == ["one:1"]
        fresh = tmp_path / "fresh"
        fresh.symlink_to("two")
        fresh.replace(data)
        assert await follower.next() == ["two:1"]
