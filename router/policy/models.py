"""The policy of each model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.policy.base import Policy
from router.policy.settings import (
    PolicyOverride,
    PolicySettings,
    effective,
    prefix_verdict,
    uses_prefix_overlap,
    uses_prompt_length,
)


class Policies:
    """One policy a model, made when first asked for, from the settings in effect for it.

    `make` builds a policy for (model, settings); policies keep state, so
    models do not share them.
    """

    def __init__(
        self,
        defaults: PolicySettings,
        make: Callable[[str, PolicySettings], Policy],
        models: Mapping[str, PolicyOverride] | None = None,
    ) -> None:
        self._defaults = defaults
        self._models = dict(models or {})
        self._make = make
        self._policies: dict[str, Policy] = {}
        self._settings: dict[str, PolicySettings] = {}

    def of(self, model: str) -> Policy:
        """The model's policy, always the same one."""
        policy = self._policies.get(model)
        if policy is None:
            policy = self._policies[model] = self._make(model, self.settings(model))
        return policy

    def settings(self, model: str, *, prefix_credit: float | None = None) -> PolicySettings:
        """The settings in effect for a request of the model with such a credit of its own."""
        if prefix_credit is not None:
            request = PolicyOverride(prefix_credit=prefix_credit)
            return effective(self._defaults, self._models.get(model), request)
        # Asked several times a request.
        settings = self._settings.get(model)
        if settings is None:
            settings = effective(self._defaults, self._models.get(model))
            self._settings[model] = settings
        return settings

    def uses_prefix_overlap(self, model: str, *, prefix_credit: float | None = None) -> bool:
        """The gate (`settings.uses_prefix_overlap`) for such a request, or leg of one."""
        return uses_prefix_overlap(self.settings(model, prefix_credit=prefix_credit))

    def uses_prompt_length(self, model: str, *, prefix_credit: float | None = None) -> bool:
        """As `settings.uses_prompt_length`, for such a request."""
        return uses_prompt_length(self.settings(model, prefix_credit=prefix_credit))

    def prefix_verdict(self, model: str, *, prefix_credit: float | None = None) -> str:
        """As `settings.prefix_verdict`, for such a request."""
        return prefix_verdict(self.settings(model, prefix_credit=prefix_credit))

    @property
    def may_score_prefixes(self) -> bool:
        """Whether the policy of any model is prefix: then a request may bring a credit."""
        overrides = (effective(self._defaults, model) for model in self._models.values())
        return any(s.policy == "prefix" for s in (self._defaults, *overrides))
