"""What operators have told a router process, for a sibling that starts later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from router.config import worker_address
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker, WorkerState
from router.observe.logging import level, set_level
from router.request.explain import Explainer
from router.rpc.admin import ROLES, AdminService, Context
from router.wire import admin

# Not of any public service: answers with an admin.ListWorkersResponse.
ORDERS_SERVICE = "mmrouter.internal.Siblings"
ORDERS_METHOD = f"/{ORDERS_SERVICE}/Orders"


class Orders(AdminService):
    """RouterAdmin of one process, which remembers the workers it was told of.

    An order stands while the fleet is as it says: a worker that was added and
    is still there, or one that was taken out and has not come back.
    """

    def __init__(self, fleet: Fleet, explainer: Explainer, clock: Callable[[], float]) -> None:
        super().__init__(fleet, explainer, clock)
        self._added: set[str] = set()
        self._taken_out: set[str] = set()

    async def AddWorker(
        self, request: admin.AddWorkerRequest, context: Context
    ) -> admin.AddWorkerResponse:
        """Registers a worker, pending."""
        answer = await super().AddWorker(request, context)
        self._note_added(answer.worker.address)
        return answer

    async def DrainWorker(
        self, request: admin.DrainWorkerRequest, context: Context
    ) -> admin.DrainWorkerResponse:
        """Stops new requests for a worker; it goes when it is idle."""
        answer = await super().DrainWorker(request, context)
        self._note_taken_out(answer.worker.address)
        return answer

    async def RemoveWorker(
        self, request: admin.RemoveWorkerRequest, context: Context
    ) -> admin.RemoveWorkerResponse:
        """Takes a worker out at once."""
        answer = await super().RemoveWorker(request, context)
        self._note_taken_out(answer.worker.address)
        return answer

    def standing(self) -> admin.ListWorkersResponse:
        """The orders that stand: workers to add, as they are now, and as GONE those to take out."""
        self._forget()
        response = admin.ListWorkersResponse()
        for address in sorted(self._added):
            if worker := self._present(address):
                response.workers.add(
                    address=address, role=worker.role.name, labels=dict(worker.labels)
                )
        for address in sorted(self._taken_out):
            response.workers.add(address=address, state=admin.WorkerState.GONE)
        return response

    async def adopt(self, orders: Iterable[admin.Worker]) -> None:
        """Does what a sibling was told."""
        for order in orders:
            present = self._present(order.address)
            if order.state == admin.WorkerState.GONE:
                self._note_taken_out(order.address)
                if present is not None:
                    await self._fleet.remove(present)
                continue
            role, labels = ROLES[order.role], dict(order.labels)
            if present is None:
                self._fleet.add(order.address, role=role, labels=labels)
            elif present.role is role:
                present.endpoint = replace(present.endpoint, labels=labels)
            else:
                # A source lists it as it was before it was taken out and added anew.
                wanted = replace(present.endpoint, role=role, labels=labels)
                self._fleet.replace(present, "it was added with another role", wanted)
            self._note_added(order.address)

    def log_from(self, least: admin.LogLevel) -> None:
        """Logs from the level that a sibling logs from."""
        name = admin.LogLevel.Name(least)
        if least != admin.LOG_LEVEL_UNSPECIFIED and name.lower() != level():
            set_level(name)

    def _note_added(self, address: str) -> None:
        self._taken_out.discard(address)
        self._added.add(address)
        self._forget()

    def _note_taken_out(self, address: str) -> None:
        self._added.discard(address)
        self._taken_out.add(address)

    def _forget(self) -> None:
        self._added = {a for a in self._added if self._present(a)}
        self._taken_out = {a for a in self._taken_out if not self._present(a)}

    def _present(self, address: str) -> Worker | None:
        """The worker that stands at an address; one that only finishes does not."""
        present = self._fleet.registry.get(worker_address(address))
        return None if present is None or present.state is WorkerState.DRAINING else present
