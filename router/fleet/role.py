"""Which part of a request a worker takes."""

from __future__ import annotations

from router.fleet.worker import Role, Worker

_BY_KV_ROLE = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}


def effective_role(worker: Worker) -> Role:
    """The role that the operator gave, else the one that the worker's KV connector has.

    A worker whose connector does both is an ordinary one unless it was
    registered as one side of a pair.
    """
    if worker.role is not Role.BOTH or worker.capability is None:
        return worker.role
    return _BY_KV_ROLE.get(worker.capability.kv_role, Role.BOTH)
