"""Settings of what the router shows: listeners, their security, logs and traces."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from router.config.values import Collector, Duration, Listener, Size

# Seconds. gRPC counts milliseconds in 32 bits, which end after twenty-four days.
_LONGEST_PING = 2_000_000.0


class Faces(BaseModel):
    """Addresses, and what holds for every connection."""

    listen: Listener = Field(
        "127.0.0.1:50050", min_length=1, description="address of the gRPC listener"
    )
    http: Listener = Field(
        "127.0.0.1:9090",
        description="address for /metrics, /livez, /readyz and /statusz; empty for none",
    )
    admin: Listener = Field(
        "",
        description="address (HOST:PORT or unix:PATH) of RouterAdmin; by default it is on the "
        "gRPC listener if that is a loopback address, and off otherwise",
    )
    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="router processes that share the listener; limits, budgets and caches are of "
        "each, and connections are spread among them by the kernel",
    )
    max_message_bytes: Size = Field(
        512 << 20, ge=64 << 10, lt=2 << 30, description="largest gRPC message on every hop"
    )
    keepalive_min_client_interval: Duration = Field(
        5.0, gt=0, le=_LONGEST_PING, description="clients may ping this often"
    )
    keepalive_worker_interval: Duration = Field(
        330.0,
        ge=300.0,
        le=_LONGEST_PING,
        description="workers are pinged this often; gRPC servers close connections that ping "
        "more often than every 5m",
    )


class Security(BaseModel):
    """Certificates and tokens, of clients and of workers."""

    tls_cert: str = Field("", description="PEM file with the listener's certificate chain")
    tls_key: str = Field("", description="PEM file with its private key")
    tls_client_ca: str = Field(
        "", description="PEM file with the CAs whose certificates clients have to show"
    )
    worker_tls: bool = Field(
        False, description="connect to workers with TLS; implied by the other --worker-tls flags"
    )
    worker_tls_ca: str = Field(
        "", description="PEM file with the CAs of workers; by default the system's"
    )
    worker_tls_cert: str = Field("", description="PEM file with our certificate towards workers")
    worker_tls_key: str = Field("", description="PEM file with its private key")
    worker_tls_server_name: str = Field(
        "", description="name in workers' certificates, where it is not the host of the address"
    )
    client_tokens: str = Field(
        "", description="file of bearer tokens, one a line, of which clients have to send one"
    )
    admin_tokens: str = Field("", description="file of bearer tokens, one a line, for RouterAdmin")


class Telling(BaseModel):
    """Logs and traces."""

    log_format: Literal["json", "console"] = Field("json", description="form of log lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )
    otlp_endpoint: Collector = Field(
        "",
        description="send traces to an OpenTelemetry collector at http://HOST:PORT or "
        "https://HOST:PORT (OTLP over gRPC); needs the extra `otel`",
    )
