"""Settings of choosing, and which of them are in effect for a request."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class PolicySettings:
    """The policy's name and its weights.

    prefix_credit: share of a cached prompt token's work that counts as saved.
        1 is what the engine saves; 0 ignores prefixes, and spares the work of
        knowing them.
    prefill_weight: seconds that a second of a request's own prompt work
        counts. Above 1 because work that is not saved also delays those who
        come later: 1 / (1 - utilisation) in a queue with Poisson arrivals.
    wait_weight: seconds that a second of waiting counts.
    crowd_weight: seconds of prompt work that a context token in flight counts
        as a prompt token's share; spreads decodes over workers that are equal
        otherwise.
    spill_wait: seconds that a request waits longer at a worker for the sake of
        its prefix than at the least busy one; beyond it the prefix counts for
        nothing there, so that a hot prefix is copied before a queue forms.
    silence_veto: seconds without output, in spite of work, after which a
        worker is left out while others are there.
    prefix_temperature: 0 takes the best; above, the choice is drawn with
        probabilities exp(-cost / (spread of costs * temperature)).
    event_bridge: seconds that our own decision counts as a cached prefix at a
        worker that reports its blocks; a little longer than a prompt takes.
    approximate_ttl: the same for a worker that does not report; renewed by use.
    hash_load_factor: how far above the mean the load of a worker may be before
        a routing key goes on to the next of its workers, at least 1.
    """

    policy: str = "round_robin"
    prefix_credit: float = 1.0
    prefill_weight: float = 1.5
    wait_weight: float = 1.0
    crowd_weight: float = 0.01
    spill_wait: float = 5.0
    silence_veto: float = 3.0
    prefix_temperature: float = 0.0
    event_bridge: float = 30.0
    approximate_ttl: float = 120.0
    hash_load_factor: float = 1.25

    def __post_init__(self) -> None:
        if self.hash_load_factor < 1:
            raise ValueError("hash_load_factor must be at least 1")
        for field in dataclasses.fields(self):
            if field.name != "policy" and getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} must not be negative")


@dataclass(frozen=True)
class PolicyOverride:
    """What a model's or a request's settings say differently; None says nothing."""

    policy: str | None = None
    prefix_credit: float | None = None
    prefill_weight: float | None = None
    wait_weight: float | None = None
    crowd_weight: float | None = None
    spill_wait: float | None = None
    silence_veto: float | None = None
    prefix_temperature: float | None = None
    event_bridge: float | None = None
    approximate_ttl: float | None = None
    hash_load_factor: float | None = None


def effective(
    defaults: PolicySettings,
    model: PolicyOverride | None = None,
    request: PolicyOverride | None = None,
) -> PolicySettings:
    """The request's word before the model's, and that before the router's."""
    said: dict[str, str | float] = {}
    for override in (model, request):
        if override is not None:
            for field in dataclasses.fields(override):
                value = getattr(override, field.name)
                if value is not None:
                    said[field.name] = value
    # Asked more than once a request, and mostly nobody says anything.
    if not said:
        return defaults
    return dataclasses.replace(defaults, **said)  # type: ignore[arg-type]


def uses_prefix_overlap(settings: PolicySettings) -> bool:
    """Whether anybody will ask how much of a prompt a worker has.

    The one gate of all work done for that question: block keys, identities of
    media for routing, sizes of images that are only referred to, event
    subscriptions. Asked of the effective settings, of each leg by itself, and
    whether or not workers send events: without them our own decisions count.
    """
    return settings.policy == "prefix" and settings.prefix_credit > 0


def uses_prompt_length(settings: PolicySettings) -> bool:
    """Whether a choice goes by how long prompts are, so that guesses of it are worth a look.

    Asked before the first bytes of a picture are fetched, of which the worker
    is only sent the reference, to learn its size. The other policies choose
    without it, or by a key; what they reserve is the length of a typical picture.
    """
    return settings.policy in ("least_load", "power_of_two") or uses_prefix_overlap(settings)


def prefix_verdict(settings: PolicySettings) -> str:
    """Whether the gate is open, and why, for people."""
    if settings.policy != "prefix":
        return f"not scored: the policy is {settings.policy}"
    if not uses_prefix_overlap(settings):
        return "not scored: prefix_credit is 0"
    return f"scored with a credit of {settings.prefix_credit:g}"
