"""A double of the Kubernetes API server, with all the ways to lose a watch."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from router.fleet.discovery.kube_access import KubeAccess

NAMESPACE = "serving"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


class KubeApi:
    """State, and the watches that stand on it.

    `silent` changes happen without an event, as when a watch was cut in
    between and nobody saw them. `lists` and `watches` are the queries that came.
    It has one client, which holds one watch at a time: by asking anew it has
    left the watch before, however late its connection is seen to close.
    """

    def __init__(self) -> None:
        self.version = 1000
        self.slices: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.lists: list[dict[str, str]] = []
        self.watches: list[dict[str, str]] = []
        self.tokens: list[str | None] = []
        self.pod_reads = 0
        # Answers instead of the next watches or lists: an HTTP status.
        self.refuse_watches: list[int] = []
        self.refuse_lists: list[int] = []
        # The same, and of pods, with status 200: what answers is no API server, or has lost its
        # mind.
        self.rubbish: list[Any] = []
        self.pod_rubbish: list[Any] = []
        self.page = 0
        self._open: list[asyncio.Queue[bytes | None]] = []

    @property
    def standing(self) -> int:
        return len(self._open)

    # -- Changes

    def put(self, name: str, *hosts: str, silent: bool = False, **more: Any) -> dict[str, Any]:
        """Creates or changes a slice; returns it."""
        known = name in self.slices
        self.version += 1
        piece = endpoint_slice(name, *hosts, version=self.version, **more)
        self.slices[name] = piece
        if not silent:
            self.send({"type": "MODIFIED" if known else "ADDED", "object": piece})
        return piece

    def delete(self, name: str, *, silent: bool = False) -> None:
        self.version += 1
        piece = self.slices.pop(name)
        piece = {**piece, "metadata": {**piece["metadata"], "resourceVersion": str(self.version)}}
        if not silent:
            self.send({"type": "DELETED", "object": piece})

    def send(self, event: dict[str, Any]) -> None:
        """Puts any event into every watch."""
        for queue in self._open:
            queue.put_nowait(json.dumps(event).encode() + b"\n")

    def send_raw(self, data: bytes) -> None:
        for queue in self._open:
            queue.put_nowait(data)

    def cut(self) -> None:
        """Ends every watch."""
        for queue in self._open:
            queue.put_nowait(None)
        self._open.clear()

    # -- Requests

    async def _get_slices(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization"))
        query = dict(request.query)
        if query.pop("labelSelector", "") != "kubernetes.io/service-name=workers":
            return web.json_response(_listing([], {"resourceVersion": "1"}))
        if "watch" in query:
            return await self._watch(request, query)
        self.lists.append(query)
        self.cut()
        if self.refuse_lists:
            return web.Response(status=self.refuse_lists.pop(0), text="refused")
        if self.rubbish:
            return web.json_response(self.rubbish.pop(0))
        names = sorted(self.slices)
        start = int(query.get("continue", "0"))
        end = start + self.page if self.page else len(names)
        metadata = {"resourceVersion": str(self.version)}
        if end < len(names):
            metadata["continue"] = str(end)
        items = [self.slices[name] for name in names[start:end]]
        return web.json_response(_listing(items, metadata))

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        self.watches.append(query)
        self.cut()
        if self.refuse_watches:
            return web.Response(status=self.refuse_watches.pop(0), text="refused")
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._open.append(queue)
        try:
            while (data := await queue.get()) is not None:
                await response.write(data)
        finally:
            if queue in self._open:
                self._open.remove(queue)
        return response

    async def _get_pod(self, request: web.Request) -> web.Response:
        self.pod_reads += 1
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return web.Response(status=404, text="no such pod")
        if self.pod_rubbish:
            return web.json_response(self.pod_rubbish.pop(0))
        return web.json_response({"kind": "Pod", "metadata": pod})

    @asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[KubeAccess]:
        """Access to it in the clear, or by `https` with whatever the caller adds."""
        app = web.Application()
        app.router.add_get(SLICES, self._get_slices)
        app.router.add_get(f"/api/v1/namespaces/{NAMESPACE}/pods/{{name}}", self._get_pod)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        try:
            scheme = "https" if tls else "http"
            yield KubeAccess(f"{scheme}://127.0.0.1:{runner.addresses[0][1]}", token="secret")
        finally:
            self.cut()
            await runner.cleanup()


def _listing(items: list[dict[str, Any]], metadata: dict[str, str]) -> dict[str, Any]:
    return {"kind": "EndpointSliceList", "items": items, "metadata": metadata}


def endpoint_slice(
    name: str,
    *hosts: str,
    version: int = 1,
    port: int = 50051,
    family: str = "IPv4",
    labels: dict[str, str] | None = None,
    conditions: dict[str, Any] | None = None,
    ports: list[dict[str, Any]] | None = None,
    pods: bool = False,
) -> dict[str, Any]:
    """A slice with one endpoint for each host; with `pods`, behind pods of the same name."""
    return {
        "metadata": {"name": name, "resourceVersion": str(version), "labels": labels or {}},
        "addressType": family,
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}] if ports is None else ports,
        "endpoints": [
            {
                "addresses": [host],
                "conditions": {"ready": True} if conditions is None else conditions,
                **(
                    {"targetRef": {"kind": "Pod", "name": f"pod-{host}", "uid": f"uid-{host}"}}
                    if pods
                    else {}
                ),
            }
            for host in hosts
        ],
    }
