"""Workers of a Kubernetes Service, against an API server that behaves badly."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import trustme

from router.fleet.discovery import kubernetes
from router.fleet.discovery.kube_slices import Keys, ServiceName
from router.fleet.discovery.kubernetes import KubernetesDiscovery, KubeSettings
from router.fleet.endpoint import Endpoint, Role
from tests.fleet.kube_api import NAMESPACE, KubeApi, endpoint_slice
from tests.serving import eventually


class Seen:
    """The sets as they come."""

    def __init__(self) -> None:
        self.sets: list[list[Endpoint]] = []

    @property
    def now(self) -> list[str] | None:
        return [e.address.partition(":")[0] for e in self.sets[-1]] if self.sets else None


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(kubernetes, "_LONGEST_PAUSE", 0.01)


@asynccontextmanager
async def following(
    api: KubeApi,
    *,
    resync: float = 300.0,
    keys: Keys = Keys(),  # noqa: B008
) -> AsyncIterator[Seen]:
    seen = Seen()
    async with api.serving() as access:
        service = ServiceName(NAMESPACE, "workers")
        source = KubernetesDiscovery(service, access, KubeSettings(resync, keys))

        async def follow() -> None:
            async for endpoints in source.sets():
                seen.sets.append(list(endpoints))

        task = asyncio.create_task(follow())
        try:
            yield seen
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_list_first_then_events() -> None:
    api = KubeApi()
    api.put("a", "10.0.0.1")
    async with following(api) as seen:
        await eventually(lambda: seen.now == ["10.0.0.1"] and api.standing)
        assert api.watches[0]["resourceVersion"] == str(api.version)
        assert api.watches[0]["allowWatchBookmarks"] == "true"
        api.put("b", "10.0.0.2")
        await eventually(lambda: seen.now == ["10.0.0.1", "10.0.0.2"])
        api.put("b", "10.0.0.3")
        await eventually(lambda: seen.now == ["10.0.0.1", "10.0.0.3"])
        api.delete("a")
        await eventually(lambda: seen.now == ["10.0.0.3"])
        assert set(api.tokens) == {"Bearer secret"}
        assert len(api.lists) == 1


async def test_long_lists_come_in_pages() -> None:
    api = KubeApi()
    api.page = 2
    for i in range(5):
        api.put(f"s{i}", f"10.0.0.{i}")
    async with following(api) as seen:
        await eventually(lambda: seen.now == [f"10.0.0.{i}" for i in range(5)])
        assert len(api.lists) == 3


async def test_what_was_deleted_while_no_watch_stood_is_found_out_by_the_next_list() -> None:
    api = KubeApi()
    api.put("a", "10.0.0.1")
    api.put("b", "10.0.0.2")
    async with following(api) as seen:
        await eventually(lambda: api.standing)
        api.delete("a", silent=True)
        api.put("c", "10.0.0.3", silent=True)
        api.cut()
        await eventually(lambda: seen.now == ["10.0.0.2", "10.0.0.3"])


async def test_what_was_lost_within_a_standing_watch_is_found_out_by_the_resync() -> None:
    api = KubeApi()
    api.put("a", "10.0.0.1")
    async with following(api, resync=0.2) as seen:
        await eventually(lambda: api.standing)
        api.delete("a", silent=True)
        await eventually(lambda: seen.now == [])


@pytest.mark.parametrize("way", ["status", "event"])
async def test_a_version_that_is_gone_means_a_new_list(way: str) -> None:
    api = KubeApi()
    api.put("a", "10.0.0.1")
    if way == "status":
        api.refuse_watches = [410]
    async with following(api) as seen:
        await eventually(lambda: seen.now and api.standing)
        if way == "event":
            api.put("b", "10.0.0.2", silent=True)
            api.send({"type": "ERROR", "object": {"code": 410, "message": "too old"}})
        await eventually(lambda: len(api.lists) == 2 and api.standing)
        expected = ["10.0.0.1"] if way == "status" else ["10.0.0.1", "10.0.0.2"]
        await eventually(lambda: seen.now == expected)


async def test_old_events_that_come_again_change_nothing() -> None:
    api = KubeApi()
    old = api.put("a", "10.0.0.1")
    api.put("a", "10.0.0.2")
    async with following(api) as seen:
        await eventually(lambda: api.standing)
        api.send({"type": "ADDED", "object": old})
        deleted = api.put("b", "10.0.0.9")
        await eventually(lambda: seen.now == ["10.0.0.2", "10.0.0.9"])
        api.delete("b")
        api.send({"type": "MODIFIED", "object": deleted})
        api.put("c", "10.0.0.3")
        await eventually(lambda: seen.now == ["10.0.0.2", "10.0.0.3"])
        assert all("10.0.0.1" not in e.address.split(":") for s in seen.sets for e in s)


async def test_bookmarks_and_events_split_over_packets() -> None:
    api = KubeApi()
    async with following(api) as seen:
        await eventually(lambda: api.standing)
        api.send({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "2000"}}})
        piece = api.put("a", "10.0.0.1", silent=True)
        line = json.dumps({"type": "ADDED", "object": piece}).encode()
        api.send_raw(line[:40])
        await asyncio.sleep(0.01)
        api.send_raw(line[40:] + b"\n\n")
        await eventually(lambda: seen.now == ["10.0.0.1"])


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_a_refusal_is_no_empty_set_and_is_asked_again(status: int) -> None:
    api = KubeApi()
    api.put("a", "10.0.0.1")
    async with following(api) as seen:
        await eventually(lambda: api.standing)
        api.refuse_lists = [status] * 3
        api.cut()
        await eventually(lambda: len(api.lists) == 5)
        await eventually(lambda: api.standing)
        assert all(s for s in seen.sets)


def listed(piece: Any) -> dict[str, Any]:
    metadata = {"resourceVersion": "1"}
    return {"kind": "EndpointSliceList", "metadata": metadata, "items": [piece]}


def piece_with(**fields: Any) -> dict[str, Any]:
    return endpoint_slice("a", "10.0.0.9", version=10_000) | fields


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"items": []},
        {"kind": "Status", "status": "Success", "metadata": {}},
        {"kind": "EndpointSliceList", "metadata": None, "items": []},
        [],
        None,
        listed("x"),
        listed({}),
        listed(piece_with(metadata=None)),
        listed(piece_with(metadata={"name": 3})),
        listed(piece_with(metadata={"name": "a", "labels": "x"})),
        listed(piece_with(endpoints="x")),
        listed(piece_with(endpoints=[{"addresses": [3]}])),
        listed(piece_with(endpoints=[{"addresses": ["10.0.0.9\0"]}])),
        listed(piece_with(ports="x")),
        listed(piece_with(ports=[{"port": 70000}])),
    ],
    ids=repr,
)
async def test_rubbish_is_no_empty_set_and_is_asked_again(answer: Any) -> None:
    api = KubeApi()
    api.put("a", "10.0.0.1")
    async with following(api, keys=Keys(role="r")) as seen:
        await eventually(lambda: api.standing)
        api.rubbish = [answer]
        api.cut()
        await eventually(lambda: len(api.lists) == 3 and api.standing)
        assert {tuple(e.address for e in s) for s in seen.sets} == {("10.0.0.1:50051",)}


@pytest.mark.parametrize(
    "event",
    [
        "<html>",
        "[" * 100_000,
        [],
        {},
        {"type": "ADDED", "object": {"metadata": {}}},
        {"type": "ADDED", "object": "x"},
        {"type": "ADDED", "object": piece_with(metadata="x")},
        {"type": "ADDED", "object": piece_with(endpoints=3)},
        {"type": "ERROR", "object": None},
        {"type": "ERROR", "object": {"code": "x"}},
    ],
    ids=lambda event: repr(event)[:60],
)
async def test_rubbish_in_a_watch_means_a_new_list(event: Any) -> None:
    api = KubeApi()
    api.put("a", "10.0.0.1")
    async with following(api) as seen:
        await eventually(lambda: api.standing)
        if isinstance(event, str):
            api.send_raw(event.encode() + b"\n")
        else:
            api.send(event)
        await eventually(lambda: len(api.lists) == 2 and api.standing)
        assert seen.now == ["10.0.0.1"]


async def test_role_and_model_are_on_the_slice_or_else_on_the_pod() -> None:
    api = KubeApi()
    keys = Keys(role="mmrouter/role", model="mmrouter/model")
    api.put("a", "10.0.0.1", labels={"mmrouter/role": "prefill", "mmrouter/model": "m"})
    api.put("b", "10.0.0.2", pods=True)
    api.pods["pod-10.0.0.2"] = {
        "labels": {"mmrouter/role": "decode"},
        "annotations": {"mmrouter/model": "org/m"},
    }
    async with following(api, keys=keys) as seen:
        await eventually(lambda: seen.now == ["10.0.0.1", "10.0.0.2"] and api.standing)
        assert [(e.role, e.model) for e in seen.sets[-1]] == [
            (Role.PREFILL, "m"),
            (Role.DECODE, "org/m"),
        ]
        assert seen.sets[-1][1].labels == {"pod": "pod-10.0.0.2"}
        api.put("c", "10.0.0.3")
        await eventually(lambda: seen.now == ["10.0.0.1", "10.0.0.2", "10.0.0.3"])
        assert api.pod_reads == 1, "a pod is asked for once"


@pytest.mark.parametrize(
    "answer", [{}, {"kind": "Status", "metadata": {}}, {"kind": "Pod", "metadata": "x"}], ids=repr
)
async def test_rubbish_for_a_pod_is_no_pod_without_labels(answer: Any) -> None:
    api = KubeApi()
    api.put("a", "10.0.0.1", pods=True)
    api.pods["pod-10.0.0.1"] = {"labels": {"r": "decode"}}
    api.pod_rubbish = [answer]
    async with following(api, keys=Keys(role="r")) as seen:
        await eventually(lambda: api.standing)
        assert api.pod_reads == 2
        assert [[e.role for e in s] for s in seen.sets] == [[Role.DECODE]]


async def test_the_api_server_is_checked_and_may_ask_who_we_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Mock()
    monkeypatch.setattr(kubernetes, "_log", log)
    authority, stranger = trustme.CA(), trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.configure_trust(tls)
    tls.verify_mode = ssl.CERT_REQUIRED
    own = authority.issue_cert("router@example.com")
    ca = authority.cert_pem.bytes()
    pair = {
        "client_certificate": own.cert_chain_pems[0].bytes(),
        "client_key": own.private_key_pem.bytes(),
    }
    api = KubeApi()
    api.put("a", "10.0.0.1")
    async with api.serving(tls) as access:
        for given, welcome in (
            ({"ca": ca, **pair}, True),
            ({"ca": ca}, False),
            ({"ca": stranger.cert_pem.bytes(), **pair}, False),
        ):
            lists = len(api.lists)
            service = ServiceName(NAMESPACE, "workers")
            source = KubernetesDiscovery(service, replace(access, **given), KubeSettings())
            async with aclosing(source.sets()) as sets:
                first = asyncio.ensure_future(anext(sets))
                await eventually(lambda: first.done() or log.warning.called)  # noqa: B023
                assert first.done() is welcome
                assert (len(api.lists) > lists) is welcome
                first.cancel()
                await asyncio.wait([first])
            log.reset_mock()
            api.cut()


async def test_a_role_that_is_none_keeps_the_last_good_set() -> None:
    api = KubeApi()
    api.put("a", "10.0.0.1", labels={"r": "prefill"})
    async with following(api, keys=Keys(role="r")) as seen:
        await eventually(lambda: api.standing)
        api.put("a", "10.0.0.1", labels={"r": "chef"})
        await eventually(lambda: len(api.lists) > 2)
        assert [e.role for e in seen.sets[-1]] == [Role.PREFILL]
        api.put("a", "10.0.0.1", labels={"r": "decode"})
        await eventually(lambda: [e.role for e in seen.sets[-1]] == [Role.DECODE])
