"""Policies by name."""

from __future__ import annotations

import random
from collections.abc import Callable

from router.fleet.pressure import Pressure
from router.policy.base import Candidate, Policy
from router.policy.consistent_hash import ConsistentHash
from router.policy.least_load import LeastLoad, PowerOfTwo
from router.policy.prefix import Prefix
from router.policy.random import Random
from router.policy.round_robin import RoundRobin
from router.policy.settings import PolicySettings
from router.prefix.resident import Resident


def _nowhere(candidate: Candidate) -> Resident | None:
    return None


def _unknown(candidate: Candidate) -> Pressure:
    return Pressure()


def make_policy(
    settings: PolicySettings,
    rng: random.Random | None = None,
    *,
    resident: Callable[[Candidate], Resident | None] = _nowhere,
    pressure: Callable[[Candidate], Pressure] = _unknown,
    on_choice: Callable[[int, float], None] = lambda asked, matched: None,
) -> Policy:
    """A fresh policy. Raises ValueError for an unknown name.

    `resident`, `pressure` and `on_choice` are for the prefix policy: see there.
    """
    rng = rng or random.Random()
    match settings.policy:
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(rng)
        case "least_load":
            return LeastLoad(rng)
        case "power_of_two":
            return PowerOfTwo(rng)
        case "consistent_hash":
            return ConsistentHash(settings.hash_load_factor, LeastLoad(rng))
        case "prefix":
            return Prefix(settings, resident, pressure, rng, on_choice)
    raise ValueError(f"no such policy: {settings.policy}")


def policy_named(name: str, rng: random.Random | None = None) -> Policy:
    """A fresh policy with default settings. Raises ValueError for an unknown name."""
    return make_policy(PolicySettings(policy=name), rng)
