"""Settings of attempts: retries, limits in time, breakers, overload, admission."""

from __future__ import annotations

from pydantic import BaseModel, Field

from router.config.values import Duration


class Attempts(BaseModel):
    """How often, how long and how much at once."""

    retry_max_attempts: int = Field(3, ge=1, le=10, description="attempts for one request")
    retry_budget: float = Field(
        40.0,
        ge=0,
        description="tokens of the fleet-wide retry budget; there are retries while more than "
        "half is left, 0 for none",
    )
    retry_budget_ratio: float = Field(
        0.1, ge=0, description="tokens that a success gives back; a failure takes one"
    )
    migration: bool = Field(
        False,
        description="let a stream go on at another worker when its own breaks off, where token "
        "ids alone decide what follows",
    )
    merge_chunks: bool = Field(
        True, description="join chunks of a stream that wait for their client into one message"
    )
    worker_wait: Duration = Field(
        1.0, ge=0, description="longest wait for a worker when none is available at the moment"
    )
    request_timeout: Duration = Field(600.0, gt=0, description="longest life of a request")
    connect_timeout: Duration = Field(
        5.0, gt=0, description="longest wait for a connection to a worker"
    )
    first_output_timeout: Duration = Field(
        300.0, gt=0, description="longest wait for a worker's first output"
    )
    idle_timeout: Duration = Field(
        120.0, gt=0, description="longest silence within a worker's stream"
    )
    silence_timeout: Duration = Field(
        10.0,
        gt=0,
        description="an unhealthy worker that answers nobody for so long loses its requests to "
        "others, as far as they have no output yet",
    )
    breaker_min_calls: int = Field(
        5, ge=1, description="calls in the window before a breaker may open"
    )
    breaker_failure_ratio: float = Field(
        0.5, gt=0, le=1, description="share of failures at which a breaker opens"
    )
    breaker_window: Duration = Field(30.0, gt=0, description="window over which calls are counted")
    breaker_open_for: Duration = Field(10.0, gt=0, description="time a breaker stays open")
    breaker_probes: int = Field(
        1, ge=1, description="calls that a half-open breaker admits at once"
    )
    overload_shed: bool = Field(
        True, description="refuse a request when every admissible worker is overloaded"
    )
    overload_waiting: int = Field(
        64, ge=0, description="reported waiting requests at which a worker is overloaded"
    )
    overload_kv_usage: float = Field(
        0.98, gt=0, le=1, description="KV cache use at which a worker with a queue is overloaded"
    )
    max_concurrent: int = Field(1024, ge=1, description="requests at work at once")
    queue_size: int = Field(256, ge=0, description="requests that may wait for a place")
    queue_timeout: Duration = Field(5.0, ge=0, description="longest wait for a place")
    drain_timeout: Duration = Field(
        30.0, ge=0, description="time that running requests get when the router stops"
    )
