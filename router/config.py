"""Every setting of the router once, typed.

Defaults < file (TOML) < environment (`MMROUTER_A_B`) < flags (`--a-b`). The
field `a_b` is all three: its key in the file, its variable and its flag.
"""

from __future__ import annotations

import argparse
import os
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from router.units import format_duration, format_size, parse_duration, parse_size


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


Duration = Annotated[float, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


PolicyName = Literal[
    "round_robin", "random", "power_of_two", "least_load", "consistent_hash", "prefix"
]


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


# Fields that are tables, which no flag can give.
TABLES = frozenset({"models"})


class ConfigError(ValueError):
    """A setting is wrong; the message has a line for each."""


class Settings(BaseSettings):
    """The router's settings. Durations are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="MMROUTER_", extra="forbid", frozen=True)

    # -- Faces
    listen: str = Field("127.0.0.1:50050", description="address of the gRPC listener")
    http: str = Field(
        "127.0.0.1:9090",
        description="address for /metrics, /livez, /readyz and /statusz; empty for none",
    )
    admin: str = Field(
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
        512 << 20, gt=0, lt=2 << 30, description="largest gRPC message on every hop"
    )
    keepalive_min_client_interval: Duration = Field(
        5.0, gt=0, description="clients may ping this often"
    )
    keepalive_worker_interval: Duration = Field(
        330.0,
        ge=300.0,
        description="workers are pinged this often; gRPC servers close connections that ping "
        "more often than every 5m",
    )

    # -- Security
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

    # -- Fleet
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

    # -- Deciding
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

    # -- Attempts
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

    # -- Media
    media_allow_private_hosts: bool = Field(
        False, description="fetch media from loopback, private and link-local addresses too"
    )
    media_allowed_domains: Names = Field(
        (), description="fetch media from these domains and their subdomains only"
    )
    media_local_root: str = Field("", description="serve file: URLs below this folder")
    media_max_bytes: Size = Field(256 << 20, gt=0, description="largest media item, encoded")
    image_max_input_bytes: Size | None = Field(
        None,
        gt=0,
        validation_alias=AliasChoices(
            "MMROUTER_IMAGE_MAX_INPUT_BYTES", "SMG_IMAGE_MAX_INPUT_BYTES"
        ),
        description="largest image, encoded, where it differs from --media-max-bytes",
    )
    video_max_input_bytes: Size | None = Field(
        None,
        gt=0,
        validation_alias=AliasChoices(
            "MMROUTER_VIDEO_MAX_INPUT_BYTES", "SMG_VIDEO_MAX_INPUT_BYTES"
        ),
        description="largest video, encoded, where it differs from --media-max-bytes",
    )
    media_max_pixels: int = Field(
        178_956_970, gt=0, description="most pixels of one picture, by its header"
    )
    media_budget_bytes: Size = Field(
        4 << 30,
        gt=0,
        description="memory for media at work in this process, half of it for files and tensors, "
        "half for decoded pixels",
    )
    media_request_bytes: Size | None = Field(
        None, gt=0, description="memory for the media of one request; by default half of the budget"
    )
    media_budget_wait: Duration = Field(
        0.05, ge=0, description="longest wait for room in the budget"
    )
    media_connect_timeout: Duration = Field(
        5.0, gt=0, description="longest wait for a connection to a media host"
    )
    media_image_timeout: Duration = Field(10.0, gt=0, description="longest download of an image")
    media_video_timeout: Duration = Field(30.0, gt=0, description="longest download of a video")
    media_fetch_retries: int = Field(
        2, ge=0, le=10, description="further tries of a download after a 5xx or a broken connection"
    )
    media_env_proxies: bool = Field(
        False, description="fetch media through the proxies that the environment names"
    )
    media_user_agent: str = Field("mmrouter", description="what media hosts are told of us")
    video_max_duration: Duration = Field(3600.0, gt=0, description="longest video")
    media_cache_bytes: Size = Field(
        512 << 20, ge=0, description="memory for fetched media and finished tensors; 0 for none"
    )
    shm: Literal["auto", "off"] = Field(
        "auto",
        description="give tensors through /dev/shm to workers that see the same one",
    )
    shm_min_bytes: Size = Field(
        1 << 20, gt=0, description="smaller tensors go in messages all the same"
    )
    media_threads: int = Field(
        0, ge=0, description="threads that decode and pack; 0 for one per CPU"
    )
    vision_backend: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="what resizes and packs pictures"
    )

    # -- Telling
    log_format: Literal["json", "console"] = Field("json", description="form of log lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )
    otlp_endpoint: str = Field(
        "",
        description="send traces to an OpenTelemetry collector at http://HOST:PORT or "
        "https://HOST:PORT (OTLP over gRPC); needs the extra `otel`",
    )

    @field_validator("worker", "prefill", "decode")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(worker_address(text) for text in value)

    @field_validator("dns_name")
    @classmethod
    def _name_and_port(cls, value: str) -> str:
        return worker_address(value) if value else value

    @model_validator(mode="after")
    def _certificates_have_keys(self) -> Settings:
        for prefix in ("", "worker_"):
            certificate, key = f"{prefix}tls_cert", f"{prefix}tls_key"
            if bool(getattr(self, certificate)) != bool(getattr(self, key)):
                flags = [f"--{name.replace('_', '-')}" for name in (certificate, key)]
                raise ValueError(f"{flags[0]} and {flags[1]} go together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return self

    @model_validator(mode="after")
    def _processes_can_share(self) -> Settings:
        if self.processes > 1 and self.sim:
            raise ValueError(
                "--sim runs workers inside a router, so --processes cannot have them; "
                "start them with `mmrouter sim`"
            )
        if self.processes > 1 and self.listen.startswith("unix:"):
            raise ValueError("--processes share a port, so --listen has to be HOST:PORT")
        return self

    @model_validator(mode="after")
    def _discovery_is_complete(self) -> Settings:
        needed = {"file": "discovery_file", "dns": "dns_name", "kubernetes": "kube_service"}
        for kind, name in needed.items():
            if (self.discovery == kind) != bool(getattr(self, name)):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"--discovery {kind} and {flag} go together")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings)


def worker_address(text: str) -> str:
    """HOST:PORT from `grpc://HOST:PORT` or `HOST:PORT`. Raises ValueError."""
    address = text.strip().removeprefix("grpc://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in host:
        raise ValueError(f"not a worker's address: {text!r} (write grpc://HOST:PORT)")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"not a worker's address: {text!r} (write grpc://[IPV6]:PORT)")
    return f"{host}:{int(port)}"


def load(flags: dict[str, Any], file: str | Path | None = None) -> Settings:
    """The settings in effect. `flags` are fields given on the command line.

    Raises `ConfigError`.
    """
    values = _read_file(Path(file)) if file else {}
    # pydantic-settings ranks init values over the environment, the file belongs below it.
    below = {key: value for key, value in values.items() if not _in_environment(key)}
    merged: dict[str, Any] = {**below, **flags}
    try:
        # Fields with environment aliases take their init value under the first alias.
        return Settings(**{_init_name(key): value for key, value in merged.items()})
    except ValidationError as error:
        raise ConfigError("\n".join(_problem(entry) for entry in error.errors())) from error


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    unknown = sorted(set(values) - set(Settings.model_fields))
    if unknown:
        raise ConfigError(f"{path}: unknown key: {', '.join(unknown)}")
    return values


def _environment_names(field: str) -> tuple[str, ...]:
    alias = Settings.model_fields[field].validation_alias
    if isinstance(alias, AliasChoices):
        return tuple(str(choice) for choice in alias.choices)
    return (f"MMROUTER_{field.upper()}",)


def _in_environment(field: str) -> bool:
    present = {name.upper() for name in os.environ}
    return any(name in present for name in _environment_names(field))


def _init_name(field: str) -> str:
    alias = Settings.model_fields[field].validation_alias
    return str(alias.choices[0]) if isinstance(alias, AliasChoices) else field


def _problem(error: Any) -> str:
    first, *rest = [str(part) for part in error["loc"]] or [""]
    # Names of models are as they are.
    name = ".".join([first.removeprefix("MMROUTER_").lower(), *rest])
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{name}: {message}" if name else message


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag `--a-b` for each field, unset unless given."""
    for name, info in Settings.model_fields.items():
        if name in TABLES:
            continue
        flag = f"--{name.replace('_', '-')}"
        text = info.description or ""
        kind = _plain(info.annotation)
        shown = _shown(info.default, info.metadata)
        if shown:
            text += f" (default: {shown})"
        text = text.replace("%", "%%")
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        elif typing.get_origin(kind) is Literal:
            parser.add_argument(flag, choices=typing.get_args(kind), **common)
        elif typing.get_origin(kind) is tuple:
            parser.add_argument(flag, action="append", metavar="NAME", **common)
        else:
            parser.add_argument(flag, metavar=_metavar(kind, info.metadata), **common)


def flags_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given on the command line."""
    given = {k: v for k, v in vars(arguments).items() if k in Settings.model_fields}
    return {k: ",".join(v) if isinstance(v, list) else v for k, v in given.items()}


def _plain(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def _validators(metadata: list[Any]) -> set[Any]:
    return {entry.func for entry in metadata if isinstance(entry, BeforeValidator)}


def _metavar(kind: Any, metadata: list[Any]) -> str:
    if parse_duration in _validators(metadata):
        return "TIME"
    if parse_size in _validators(metadata) or "bytes" in str(kind):
        return "SIZE"
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _shown(default: Any, metadata: list[Any]) -> str:
    if default is None or default in ("", ()):
        return ""
    if parse_duration in _validators(metadata):
        return format_duration(default)
    if parse_size in _validators(metadata):
        return format_size(default)
    return str(default)
