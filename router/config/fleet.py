"""Settings of the fleet: where workers are found, and how they are watched."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, field_validator

from router.config.values import Duration, Names, worker_address


class Fleet(BaseModel):
    """Which workers there are, and how it is known how they are."""

    worker: Names = Field((), description="a worker's address, grpc://HOST:PORT or HOST:PORT")
    prefill: Names = Field((), description="address of a worker that only prefills")
    decode: Names = Field((), description="address of a worker that only decodes")
    disagg_min_tokens: int = Field(
        0,
        ge=0,
        description="prompts with fewer tokens go straight to a decode worker, which computes "
        "them itself; 0 for none",
    )
    disagg_refetch: bool = Field(
        True,
        description="send media references to the decode worker too when the prefill worker "
        "returned no identity of them, instead of failing",
    )
    sim: int = Field(0, ge=0, le=64, description="start so many simulated workers inside")
    health_interval: Duration = Field(
        3.0, gt=0, description="time between health checks of a worker"
    )
    health_timeout: Duration = Field(
        2.0,
        gt=0,
        description="longest wait for a worker's health and load; one that exceeds it while it "
        "has requests is suspected at once",
    )
    health_failures: int = Field(
        2, ge=1, description="failed checks in a row until a worker is unhealthy"
    )
    health_successes: int = Field(
        1, ge=1, description="good checks in a row until a worker is ready again"
    )
    metadata_interval: Duration = Field(
        30.0, gt=0, description="time between readings of a worker's capability"
    )
    load_interval: Duration = Field(
        1.0, gt=0, description="time between readings of a worker's load"
    )
    engine_silence_timeout: Duration = Field(
        60.0,
        gt=0,
        description="time that an engine may be without output in spite of having requests, "
        "as it reports itself",
    )
    ready_models: Names = Field(
        (), description="the router is ready when each of these models has a ready worker"
    )
    discovery: Literal["static", "file", "dns", "kubernetes"] = Field(
        "static", description="where workers are found, besides those named with --worker"
    )
    discovery_file: str = Field("", description="file that lists the workers, TOML or JSON")
    discovery_interval: Duration = Field(
        2.0, gt=0, description="time between looks at the file, or between DNS resolutions"
    )
    dns_name: str = Field(
        "", description="HOST:PORT whose every address is a worker, as of a headless Service"
    )
    kube_service: Names = Field(
        (),
        description="NAMESPACE/NAME or NAMESPACE/NAME:PORT of a Service whose endpoints are "
        "workers",
    )
    kube_role_label: str = Field(
        "",
        description="label or annotation of EndpointSlice or pod that says both, prefill, decode "
        "or encode",
    )
    kube_model_label: str = Field(
        "", description="label or annotation of EndpointSlice or pod that names the model"
    )
    kubeconfig: str = Field(
        "", description="kubeconfig to reach the API server with; by default the pod's own account"
    )
    kube_resync: Duration = Field(
        300.0, gt=0, description="longest time between lists of a Service's endpoints"
    )

    @field_validator("worker", "prefill", "decode")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(worker_address(text) for text in value)

    @field_validator("dns_name")
    @classmethod
    def _name_and_port(cls, value: str) -> str:
        return worker_address(value) if value else value
