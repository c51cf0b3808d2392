"""Settings of decisions: where media become tensors, and which worker is chosen."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from router.config.values import Duration, PolicyName


class ModelSettings(BaseModel):
    """What one model has its own: a table `[models."NAME"]` of the file.

    Each key means what the setting of the same name means; None says nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    policy: PolicyName | None = None
    prefix_credit: float | None = Field(None, ge=0)
    prefill_weight: float | None = Field(None, ge=0)
    wait_weight: float | None = Field(None, ge=0)
    crowd_weight: float | None = Field(None, ge=0)
    spill_wait: Duration | None = Field(None, ge=0)
    silence_veto: Duration | None = Field(None, ge=0)
    prefix_temperature: float | None = Field(None, ge=0)
    event_bridge: Duration | None = Field(None, ge=0)
    approximate_ttl: Duration | None = Field(None, ge=0)
    hash_load_factor: float | None = Field(None, ge=1)


class Deciding(BaseModel):
    """Modes and policies."""

    mm_processing: Literal["auto", "router", "worker"] = Field(
        "auto",
        validation_alias=AliasChoices("MMROUTER_MM_PROCESSING", "SMG_MM_PROCESSING"),
        description="where media become tensors: in the router, in workers that offer it, "
        "or there only if all of a model's workers offer it",
    )
    allow_mm_override: bool = Field(
        False, description="honour a request's own choice of mm_processing"
    )
    policy: PolicyName = Field(
        "round_robin", description="how one of several admissible workers is chosen"
    )
    prefix_credit: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="share of a cached prompt token's work that policy prefix counts as saved; 0 "
        "ignores prefixes, and spares all work for them",
    )
    prefill_weight: float = Field(
        1.5,
        ge=0,
        allow_inf_nan=False,
        description="what a second of a request's own prompt work counts with policy prefix",
    )
    wait_weight: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="what a second of waiting counts with policy prefix",
    )
    crowd_weight: float = Field(
        0.01,
        ge=0,
        allow_inf_nan=False,
        description="what a context token in flight counts of a prompt token with policy prefix",
    )
    spill_wait: Duration = Field(
        5.0,
        ge=0,
        description="how much longer than at the least busy worker a request may wait for the "
        "sake of its prefix",
    )
    silence_veto: Duration = Field(
        3.0,
        ge=0,
        description="time without output, in spite of work, after which policy prefix leaves a "
        "worker out while others are there",
    )
    prefix_temperature: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="above 0, policy prefix draws among workers by their costs",
    )
    event_bridge: Duration = Field(
        30.0,
        ge=0,
        description="how long our own choice counts as a cached prefix at a worker that reports "
        "its blocks",
    )
    approximate_ttl: Duration = Field(
        120.0, ge=0, description="the same at a worker that does not; every use renews it"
    )
    hash_load_factor: float = Field(
        1.25,
        ge=1,
        allow_inf_nan=False,
        description="expected wait, relative to the mean, up to which a worker keeps its keys "
        "with policy consistent_hash",
    )
    models: dict[str, ModelSettings] = Field(
        default_factory=dict,
        description='what single models have their own, as tables [models."NAME"]',
    )
    allow_transfer_params: bool = Field(
        False, description="accept kv_transfer_params and data_parallel_rank from clients"
    )
    allow_client_hashes: bool = Field(
        False,
        description="take mm_hashes of clients' tensors as they are, instead of deriving them "
        "from the tensors",
    )
