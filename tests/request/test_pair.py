"""Which models are served by pairs, and what makes a role."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from router.fleet.capability import Capability
from router.fleet.role import effective_role
from router.fleet.worker import Role, Worker
from router.request import pair
from router.request.legs import incompatibility
from router.request.pair import _fitting, _no_pair, is_disaggregated
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


def sides(*kinds: dict[str, str]) -> list[Worker]:
    return [worker(f"127.0.0.1:{at + 1}", **kind) for at, kind in enumerate(kinds)]


KINDS = st.lists(
    st.fixed_dictionaries(
        {
            "kv_connector": st.sampled_from(["", "NixlConnector", "MooncakeConnector"]),
            "model_dtype": st.sampled_from(["bfloat16", "float16"]),
            "pairing_protocol": st.sampled_from(["", "1", "2"]),
            "kv_engine_id": st.sampled_from(["", "a", "b"]),
        }
    ),
    max_size=6,
)


@given(KINDS, KINDS)
def test_a_pair_is_of_any_two_that_fit(
    prefills: list[dict[str, str]], decodes: list[dict[str, str]]
) -> None:
    firsts, seconds = sides(*prefills), sides(*decodes)
    fitting = {
        p: {d for d in seconds if not incompatibility(p.capability, d.capability)}
        for p in firsts
        if p.capability is not None
    }
    expected = {p: partners for p, partners in fitting.items() if partners}
    assert {p: set(partners) for p, partners in _fitting(firsts, seconds).items()} == expected


def test_what_fits_is_asked_once_for_each_kind_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(*both: object) -> None:
        asked.append(both)

    monkeypatch.setattr(pair, "incompatibility", noted)
    kind = {"kv_connector": "NixlConnector"}
    candidates = _fitting(sides(*[kind] * 64), sides(*[kind] * 64))
    assert [len(partners) for partners in candidates.values()] == [64] * 64
    assert len(asked) == 1


def test_what_keeps_a_fleet_apart_is_asked_once_for_each_kind_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def noted(*both: Capability) -> str | None:
        asked.append(both)
        return incompatibility(*both)

    monkeypatch.setattr(pair, "incompatibility", noted)
    nixl = {"kv_connector": "NixlConnector"}
    prefills = sides(*[nixl | {"model_dtype": "float16"}] * 64, nixl | {"kv_cache_dtype": "fp8"})
    fault = _no_pair(prefills, sides(*[nixl] * 64))
    assert fault.metadata == {"cause": "model_dtype", "prefill": "65", "decode": "64"}
    assert len(asked) == 2
