"""Each model has its own policy, and its own answer at the gate."""

from __future__ import annotations

from router.policy.base import Policy
from router.policy.models import Policies
from router.policy.registry import make_policy
from router.policy.settings import PolicyOverride, PolicySettings


def policies() -> Policies:
    def make(model: str, settings: PolicySettings) -> Policy:
        return make_policy(settings)

    models = {
        "vl": PolicyOverride(policy="prefix"),
        "decode": PolicyOverride(policy="prefix", prefix_credit=0.0),
    }
    return Policies(PolicySettings(policy="least_load"), make, models)


def test_a_models_policy_is_its_own_and_stays() -> None:
    them = policies()
    assert [them.of(name).name for name in ("vl", "text")] == ["prefix", "least_load"]
    assert them.of("vl") is them.of("vl")
    assert them.of("vl") is not them.of("decode")


def test_the_gate_is_asked_for_each_model_and_request() -> None:
    them = policies()
    asked = [them.uses_prefix_overlap(name) for name in ("vl", "decode", "text")]
    assert asked == [True, False, False]
    assert not them.uses_prefix_overlap("vl", prefix_credit=0.0)
    assert them.uses_prefix_overlap("decode", prefix_credit=0.5)
    assert not them.uses_prefix_overlap("text", prefix_credit=1.0)
