"""Workers behind a Kubernetes Service, from its EndpointSlices.

List, then watch from the list's resourceVersion. A watch can lose events
without a word (a proxy that drops it, a server that restarts, a version that
is compacted away), so nothing rests on its being complete: the list is read
again after every watch, however it ended, and at least every `resync`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from router.fleet.discovery import kube_slices
from router.fleet.discovery.kube_access import KubeAccess
from router.fleet.discovery.kube_slices import Keys, Pod, ServiceName
from router.fleet.endpoint import Endpoint
from router.observe.logging import get_logger

_log = get_logger("discovery")

_PAGE = 500
_LONGEST_LINE = 16 << 20
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 10.0
_CONNECT_TIMEOUT = 10.0
_LIST_TIMEOUT = 30.0

Slices = dict[str, Mapping[str, Any]]


class ApiError(Exception):
    """The API server refused, or answered what cannot be understood."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}"[:300])
        self.status = status


@dataclass(frozen=True)
class KubeSettings:
    """`resync` is in seconds."""

    resync: float = 300.0
    keys: Keys = field(default_factory=Keys)


class KubernetesDiscovery:
    """The ready endpoints of one Service."""

    name = "kubernetes"

    def __init__(self, service: ServiceName, access: KubeAccess, settings: KubeSettings) -> None:
        self._service = service
        self._access = access
        self._settings = settings
        self._pods: dict[str, Mapping[str, Any]] = {}

    async def sets(self) -> AsyncGenerator[Sequence[Endpoint], None]:
        """See `Discovery.sets`."""
        pause, trouble = _FIRST_PAUSE, ""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                async with self._session() as session:
                    slices, version = await self._list(session)
                    yield await self._endpoints(session, slices)
                    trouble = ""
                    async for changed in self._watch(session, slices, version):
                        yield await self._endpoints(session, changed)
            except (aiohttp.ClientError, OSError, ValueError, RecursionError, ApiError) as error:
                why = str(error) or type(error).__name__
                if not (isinstance(error, ApiError) and error.status == 410) and why != trouble:
                    trouble = why
                    _log.warning("discovery_kubernetes_failed", service=self._service.name, why=why)
            # A watch that stood for a while was no failure; its end is not held against anybody.
            pause = _FIRST_PAUSE if loop.time() - began > pause * 2 else pause * 2
            pause = min(pause, _LONGEST_PAUSE)
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._access.tls()),
            timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_TIMEOUT),
        )

    # -- Requests

    async def _list(self, session: aiohttp.ClientSession) -> tuple[Slices, str]:
        slices: Slices = {}
        onward = ""
        while True:
            page = await self._get(
                session, self._slices_path, self._selector | {"limit": str(_PAGE)} | _if(onward)
            )
            metadata, items = page.get("metadata"), page.get("items")
            if page.get("kind") != "EndpointSliceList" or not isinstance(metadata, dict):
                # Somebody between us and the server: an empty answer is no empty fleet.
                raise ApiError(200, "the answer is not an EndpointSliceList")
            for item in items if isinstance(items, list) else ():
                slices[_name(item)] = item
            onward = str(metadata.get("continue") or "")
            if not onward:
                return slices, str(metadata.get("resourceVersion") or "")

    async def _watch(
        self, session: aiohttp.ClientSession, slices: Slices, version: str
    ) -> AsyncGenerator[Slices, None]:
        resync = self._settings.resync
        query = self._selector | {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(resync))),
        }
        seen: dict[str, int] = {}
        floor = _number(version)
        async with session.get(
            self._access.server + self._slices_path,
            params=query,
            headers=self._access.headers(),
            timeout=aiohttp.ClientTimeout(total=resync, connect=_CONNECT_TIMEOUT),
        ) as response:
            await _expect_ok(response)
            try:
                async for line in _lines(response.content):
                    event = json.loads(line)
                    if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
                        raise ApiError(0, "an event without an object")
                    kind, item = event.get("type"), event["object"]
                    if kind == "ERROR":
                        raise ApiError(_code(item.get("code")), str(item.get("message")))
                    if kind == "BOOKMARK":
                        continue
                    name = _name(item)
                    at = _number(item["metadata"].get("resourceVersion"))
                    if at and at <= max(seen.get(name, 0), floor):
                        continue  # told before: an old state must not come back
                    seen[name] = at
                    if kind == "DELETED":
                        slices.pop(name, None)
                    else:
                        slices[name] = item
                    yield slices
            except TimeoutError:
                return  # `resync` is over

    async def _get(
        self, session: aiohttp.ClientSession, path: str, query: Mapping[str, str]
    ) -> dict[str, Any]:
        async with session.get(
            self._access.server + path,
            params=query,
            headers=self._access.headers(),
            timeout=aiohttp.ClientTimeout(total=_LIST_TIMEOUT, connect=_CONNECT_TIMEOUT),
        ) as response:
            await _expect_ok(response)
            answer = await response.json(content_type=None)
            if not isinstance(answer, dict):
                raise ApiError(response.status, "the answer is not an object")
            return answer

    @property
    def _slices_path(self) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{self._service.namespace}/endpointslices"

    @property
    def _selector(self) -> dict[str, str]:
        return {"labelSelector": f"kubernetes.io/service-name={self._service.name}"}

    # -- Reading

    async def _endpoints(
        self, session: aiohttp.ClientSession, slices: Slices
    ) -> Sequence[Endpoint]:
        try:
            return await self._read(session, slices)
        except (AttributeError, LookupError, TypeError) as error:
            raise ApiError(0, "an object is not as the API has it") from error

    async def _read(self, session: aiohttp.ClientSession, slices: Slices) -> Sequence[Endpoint]:
        found = kube_slices.read(slices.values(), self._service.port)
        pods = {f.pod.uid for f in found if f.pod is not None}
        self._pods = {uid: m for uid, m in self._pods.items() if uid in pods}
        keys = self._settings.keys
        endpoints = []
        for one in found:
            pod_metadata: Mapping[str, Any] = {}
            if one.pod is not None and not keys.told_by(one.slice_metadata):
                pod_metadata = await self._pod(session, one.pod)
            endpoints.append(one.endpoint(keys, pod_metadata))
        return endpoints

    async def _pod(self, session: aiohttp.ClientSession, pod: Pod) -> Mapping[str, Any]:
        if pod.uid not in self._pods:
            path = f"/api/v1/namespaces/{self._service.namespace}/pods/{pod.name}"
            try:
                found = await self._get(session, path, {})
            except ApiError as error:
                if error.status != 404:
                    raise
                return {}  # gone by now; the next event will say so
            metadata = found.get("metadata")
            if found.get("kind") != "Pod" or not isinstance(metadata, dict):
                # As with slices: what has no labels would be another role, and stay one.
                raise ApiError(200, "the answer is not a Pod")
            self._pods[pod.uid] = metadata
        return self._pods[pod.uid]


async def _expect_ok(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise ApiError(response.status, (await response.text())[:200])


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise ApiError(0, "an event is too long")
        for line in lines:
            if line.strip():
                yield line


def _name(item: Any) -> str:
    """The name of a slice. Raises `ApiError` for what is none."""
    metadata = item.get("metadata") if isinstance(item, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        raise ApiError(0, "an EndpointSlice without a name")
    return name


def _code(status: object) -> int:
    return status if isinstance(status, int) else 0


def _number(version: object) -> int:
    # Opaque by contract, and a number in every server there is; what is none is not compared.
    return int(version) if isinstance(version, str) and version.isdigit() else 0


def _if(onward: str) -> dict[str, str]:
    return {"continue": onward} if onward else {}
