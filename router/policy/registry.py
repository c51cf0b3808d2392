"""Policies by name."""

from __future__ import annotations

import random

from router.policy.base import Policy
from router.policy.least_load import LeastLoad, PowerOfTwo
from router.policy.random import Random
from router.policy.round_robin import RoundRobin


def policy_named(name: str, rng: random.Random | None = None) -> Policy:
    """A fresh policy. Raises ValueError for an unknown name."""
    rng = rng or random.Random()
    match name:
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(rng)
        case "least_load":
            return LeastLoad(rng)
        case "power_of_two":
            return PowerOfTwo(rng)
    raise ValueError(f"no such policy: {name}")
