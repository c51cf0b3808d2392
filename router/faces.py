"""What clients, operators and sibling processes connect to: gRPC, RouterAdmin, HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
from grpc_reflection.v1alpha import reflection

from router.config import Settings
from router.fleet.fleet import Fleet
from router.observe.http import HttpFace
from router.observe.logging import get_logger
from router.observe.metrics import Metrics
from router.observe.statusz import page
from router.request.explain import Explainer
from router.request.pipeline import Pipeline
from router.rooms import CannotStart, accepted_schemes, is_loopback, server_options
from router.rpc.account import Accounts
from router.rpc.admin import AdminService
from router.rpc.engine import EngineService
from router.rpc.fleet_view import FleetView
from router.rpc.health import HealthFace
from router.rpc.orders import Orders
from router.rpc.security import Security
from router.rpc.siblings import AdminOfAll, Siblings, sibling_handlers
from router.status import StatusPage
from router.supervise.place import Place
from router.wire import ADMIN_SERVICE, ENGINE_SERVICE, router_pb2_grpc

A = TypeVar("A", bound=AdminService)

_log = get_logger("app")


class Faces:
    """The listeners of one process, each open for as long as its context.

    `listen` and `http` are addresses with their real ports, once bound; `http`
    stays empty where there is none.
    """

    def __init__(
        self,
        settings: Settings,
        security: Security,
        fleet: Fleet,
        pipeline: Pipeline,
        explainer: Explainer,
        accounts: Accounts,
        health: HealthFace,
        place: Place | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        """`place` and `siblings` are those of this process among several on one port."""
        self.listen = ""
        self.http = ""
        self._settings = settings
        self._security = security
        self._fleet = fleet
        self._pipeline = pipeline
        self._explainer = explainer
        self._accounts = accounts
        self._health = health
        self._place = place
        self._siblings = siblings

    @asynccontextmanager
    async def listener(self) -> AsyncIterator[grpc.aio.Server]:
        """The gRPC listener, and RouterAdmin there or at an address of its own."""
        security = self._security
        server = grpc.aio.server(
            interceptors=security.interceptors,
            options=server_options(self._settings, shared=self._place is not None),
        )
        view = self._view()
        server.add_generic_rpc_handlers(
            (EngineService(self._pipeline, view, self._accounts).handlers(),)
        )
        self._health.register(server)
        own = self._settings.admin
        public = not own and is_loopback(self._settings.listen)
        if public:
            self._register_admin(server)
        names = [ENGINE_SERVICE, self._health.SERVICE, reflection.SERVICE_NAME]
        reflection.enable_server_reflection((*names, ADMIN_SERVICE) if public else names, server)
        self.listen = bind(server, self._settings.listen, security.listener)
        admin = grpc.aio.server(interceptors=security.interceptors) if own else None
        if admin is not None:
            self._register_admin(admin)
            bind(admin, own, None if own.startswith("unix:") else security.listener)
            if not (
                is_loopback(own) or self._settings.admin_tokens or self._settings.tls_client_ca
            ):
                _log.warning("admin_open", why="whoever reaches its address may change the fleet")
            await admin.start()
        elif not public:
            _log.info("admin_off", why="the listener is not a loopback address; set --admin")
        await server.start()
        try:
            yield server
        finally:
            await server.stop(0)
            if admin is not None:
                await admin.stop(0)

    def _register_admin(self, server: grpc.aio.Server) -> None:
        own = self._admin(AdminService)
        service = own if self._siblings is None else AdminOfAll(own, self._siblings)
        router_pb2_grpc.add_RouterAdminServicer_to_server(service, server)

    def _admin(self, kind: type[A]) -> A:
        return kind(self._fleet, self._explainer, self._fleet.registry.clock)

    def _view(self) -> FleetView:
        schemes = accepted_schemes(self._settings)
        return FleetView(self._fleet.registry, self._pipeline, schemes, self._siblings)

    @asynccontextmanager
    async def siblings_calls(self) -> AsyncIterator[Orders | None]:
        """Takes the calls of sibling processes; the orders that they pass on, None alone."""
        place, siblings = self._place, self._siblings
        if place is None or siblings is None:
            yield None
            return
        orders = self._admin(Orders)
        server = grpc.aio.server()
        router_pb2_grpc.add_RouterAdminServicer_to_server(orders, server)
        server.add_generic_rpc_handlers(sibling_handlers(orders, self._view().abort_here))
        bind(server, place.grpc(place.number))
        await server.start()
        try:
            yield orders
        finally:
            await server.stop(0)

    @asynccontextmanager
    async def pages(
        self, metrics: Metrics, why_not_ready: Callable[[], str | None], status: StatusPage
    ) -> AsyncIterator[None]:
        """The HTTP listener, where the settings ask for one. Raises `CannotStart`."""
        address = self._settings.http
        if not address:
            yield
            return
        face = HttpFace(metrics, why_not_ready, lambda: page(status.status(why_not_ready())))
        try:
            await face.start(address)
        except (OSError, ValueError, OverflowError) as error:
            raise CannotStart(f"cannot serve HTTP on {address}: {error}") from error
        self.http = face.address
        try:
            yield
        finally:
            await face.stop()


def bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> str:
    """Binds a listener; returns its address with the real port. Raises `CannotStart`."""
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise CannotStart(
            f"cannot listen on {address}: it is taken, or not an address of this host"
        )
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"
