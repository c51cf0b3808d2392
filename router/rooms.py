"""What each room is told of the one `Settings`."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import cast

from router.config import Settings
from router.fleet.breaker import BreakerSettings
from router.fleet.channel import ChannelSettings
from router.fleet.pressure import Pressure
from router.fleet.probe import ProbeSettings
from router.fleet.worker import Worker
from router.media.decode import WHITE
from router.media.limits import FetchLimits, MediaLimits, VideoLimits
from router.observe.logging import get_logger
from router.observe.metrics import Metrics
from router.observe.snapshot import Source
from router.observe.tracing import Tracing
from router.policy.base import Candidate, Policy
from router.policy.models import Policies
from router.policy.registry import make_policy
from router.policy.settings import PolicyOverride, PolicySettings
from router.request.decide import DecideSettings
from router.request.disagg import PairSettings
from router.request.pipeline import PipelineSettings
from router.request.relay import Limits
from router.request.residents import Residents
from router.request.select import OverloadRule
from router.request.shm import SharedMemory, namespace_id
from router.rpc.security import Security
from router.vision.backend.base import Backend
from router.vision.backend.choose import choose_backend

_log = get_logger("app")


class CannotStart(Exception):
    """The router cannot start; the message says why in one sentence."""


def server_options(settings: Settings, *, shared: bool = False) -> list[tuple[str, int]]:
    """gRPC server arguments: message limits, and pings as often as clients may send them.

    `shared`: other processes of the same router listen on the same port.
    """
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        (
            "grpc.http2.min_recv_ping_interval_without_data_ms",
            int(settings.keepalive_min_client_interval * 1000),
        ),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # Two routers on one port by mistake are an error, not a lottery.
        ("grpc.so_reuseport", int(shared)),
    ]


def channel_settings(settings: Settings, security: Security) -> ChannelSettings:
    return ChannelSettings(
        settings.max_message_bytes,
        settings.keepalive_worker_interval,
        security.worker_credentials,
        settings.worker_tls_server_name,
    )


def breaker_settings(settings: Settings) -> BreakerSettings:
    return BreakerSettings(
        settings.breaker_min_calls,
        settings.breaker_failure_ratio,
        settings.breaker_window,
        settings.breaker_open_for,
        settings.breaker_probes,
    )


def policy_settings(settings: Settings) -> PolicySettings:
    return PolicySettings(
        settings.policy,
        settings.prefix_credit,
        settings.prefill_weight,
        settings.wait_weight,
        settings.crowd_weight,
        settings.spill_wait,
        settings.silence_veto,
        settings.prefix_temperature,
        settings.event_bridge,
        settings.approximate_ttl,
        settings.hash_load_factor,
    )


def policy_overrides(settings: Settings) -> dict[str, PolicyOverride]:
    """What single models have their own, by their served names."""
    return {name: PolicyOverride(**own.model_dump()) for name, own in settings.models.items()}


def policies_of(settings: Settings, residents: Residents, metrics: Metrics) -> Policies:
    """One policy a model, over the fleet's workers."""

    def pressure(candidate: Candidate) -> Pressure:
        return cast("Worker", candidate).pressure

    def make(model: str, own: PolicySettings) -> Policy:
        def chosen(asked: int, matched: float) -> None:
            metrics.prefix_blocks_asked.labels(model).inc(asked)
            metrics.prefix_blocks_matched.labels(model).inc(matched)

        return make_policy(own, resident=residents.of, pressure=pressure, on_choice=chosen)

    return Policies(policy_settings(settings), make, policy_overrides(settings))


def probe_settings(settings: Settings) -> ProbeSettings:
    return ProbeSettings(
        settings.health_interval,
        settings.health_failures,
        settings.health_successes,
        settings.metadata_interval,
        settings.load_interval,
        health_timeout=settings.health_timeout,
        engine_silence=settings.engine_silence_timeout,
    )


def decide_settings(settings: Settings) -> DecideSettings:
    return DecideSettings(
        settings.mm_processing, settings.allow_mm_override, settings.allow_transfer_params
    )


def pair_settings(settings: Settings) -> PairSettings:
    return PairSettings(settings.disagg_min_tokens, settings.disagg_refetch)


def pipeline_settings(settings: Settings) -> PipelineSettings:
    return PipelineSettings(
        allow_client_hashes=settings.allow_client_hashes,
        migration=settings.migration,
        merge_chunks=settings.merge_chunks,
        request_timeout=settings.request_timeout,
    )


def overload_rule(settings: Settings) -> OverloadRule:
    return OverloadRule(
        settings.overload_shed,
        settings.overload_waiting,
        settings.overload_kv_usage,
        max_age=10 * settings.load_interval,
    )


def call_limits(settings: Settings) -> Limits:
    return Limits(
        settings.connect_timeout,
        settings.first_output_timeout,
        settings.idle_timeout,
        settings.silence_timeout,
    )


def media_limits(settings: Settings) -> MediaLimits:
    """Raises `CannotStart` when the folder of local media is none."""
    if settings.media_local_root and not Path(settings.media_local_root).is_dir():
        raise CannotStart(f"--media-local-root {settings.media_local_root} is not a folder")
    image = settings.image_max_input_bytes or settings.media_max_bytes
    video = settings.video_max_input_bytes or settings.media_max_bytes
    return MediaLimits(
        max_image_bytes=image,
        max_pixels=settings.media_max_pixels,
        # Half for files and tensors, half for decoded pixels of 3 bytes each.
        request_bytes=settings.media_request_bytes or settings.media_budget_bytes // 2,
        budget_bytes=settings.media_budget_bytes // 2,
        request_pixels=settings.media_budget_bytes // 6,
        budget_pixels=settings.media_budget_bytes // 6,
        budget_wait=settings.media_budget_wait,
        local_root=Path(settings.media_local_root) if settings.media_local_root else None,
        worker_threads=settings.media_threads or len(os.sched_getaffinity(0)),
        cache_bytes=settings.media_cache_bytes,
        background=_background(settings.media_background),
        fetch=FetchLimits(
            allow_private_hosts=settings.media_allow_private_hosts,
            allowed_domains=settings.media_allowed_domains,
            use_env_proxies=settings.media_env_proxies,
            user_agent=settings.media_user_agent,
            connect_timeout=settings.media_connect_timeout,
            image_timeout=settings.media_image_timeout,
            video_timeout=settings.media_video_timeout,
            retries=settings.media_fetch_retries,
        ),
        video=VideoLimits(max_bytes=video, max_duration=settings.video_max_duration),
    )


def _background(colour: str) -> tuple[int, int, int]:
    if colour == "white":
        return WHITE
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue


def vision_backend(settings: Settings, metrics: Metrics) -> Backend:
    """What resizes and packs pictures. Raises `CannotStart` when it is not to be had."""
    try:
        return choose_backend(settings.vision_backend, metrics.vision_fallbacks.inc)
    except ValueError as error:
        raise CannotStart(str(error)) from error


def backend_gauge(backend: Backend) -> Source:
    """Which backend resizes and packs pictures."""
    about = "1 for what resizes and packs pictures."
    name = backend.name
    return Source("router_vision_backend", about, lambda: [((name,), 1)], ("backend",))


def tracing_of(settings: Settings) -> Tracing:
    """Where traces go. Raises `CannotStart` when they cannot be sent."""
    if not settings.otlp_endpoint:
        return Tracing()
    try:
        from router.observe.otel import exporting
    except ImportError as error:
        raise CannotStart(
            f"--otlp-endpoint needs {error.name}: install mmrouter with the extra `otel`"
        ) from error
    return exporting(settings.otlp_endpoint)


def shared_memory(settings: Settings) -> SharedMemory | None:
    """Shared memory for tensors, where this host has any."""
    if settings.shm == "off" or not namespace_id():
        return None
    try:
        return SharedMemory(settings.shm_min_bytes)
    except OSError as error:
        _log.warning("shm_off", why=error.strerror)
        return None


def accepted_schemes(settings: Settings) -> list[str]:
    """The URL schemes that the router itself takes in."""
    return ["http", "https", "data", *(["file"] if settings.media_local_root else [])]


def is_loopback(address: str) -> bool:
    """Whether only this host can reach `address`."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
