"""Which models are served by pairs, and what makes a role."""

from __future__ import annotations

import pytest

from router.fleet.role import effective_role
from router.fleet.worker import Role
from router.request.pair import is_disaggregated
from tests.fleet.stand_in import worker

BOTH, PREFILL, DECODE, ENCODE = Role.BOTH, Role.PREFILL, Role.DECODE, Role.ENCODE


@pytest.mark.parametrize(
    ("roles", "paired"),
    [
        ((), False),
        ((BOTH,), False),
        ((BOTH, ENCODE), False),
        ((PREFILL, DECODE), True),
        ((PREFILL, DECODE, ENCODE), True),
        ((PREFILL, DECODE, BOTH), True),
        # The other side is not up yet: nobody else could serve the model.
        ((PREFILL,), True),
        ((DECODE,), True),
        # The ordinary worker serves it.
        ((PREFILL, BOTH), False),
        ((DECODE, BOTH), False),
    ],
)
def test_a_model_is_served_by_pairs(roles: tuple[Role, ...], paired: bool) -> None:
    workers = [worker(f"127.0.0.1:{at + 1}", role=role) for at, role in enumerate(roles)]
    assert is_disaggregated(workers) == paired


@pytest.mark.parametrize(
    ("given", "kv_role", "role"),
    [
        (BOTH, "", BOTH),
        (BOTH, "kv_both", BOTH),
        (BOTH, "kv_producer", PREFILL),
        (BOTH, "kv_consumer", DECODE),
        (PREFILL, "kv_both", PREFILL),
        # The operator knows better.
        (DECODE, "kv_producer", DECODE),
        (ENCODE, "kv_producer", ENCODE),
    ],
)
def test_a_role_is_the_operators_or_the_connectors(given: Role, kv_role: str, role: Role) -> None:
    assert effective_role(worker(role=given, kv_role=kv_role)) is role


def test_a_worker_whose_metadata_are_not_read_has_the_role_it_was_given() -> None:
    assert effective_role(worker(role=PREFILL, known=False)) is PREFILL
    assert effective_role(worker(known=False)) is BOTH
