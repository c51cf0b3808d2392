"""Connections to workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc


@dataclass(frozen=True)
class ChannelSettings:
    """Limits of a channel to a worker; bytes and seconds.

    `credentials` gives what to connect with, read anew for each channel; None
    for connections in the clear. `server_name` is the name that a worker's
    certificate has to carry; empty for the host part of its address.
    """

    max_message_bytes: int = 512 << 20
    keepalive_interval: float = 330.0
    credentials: Callable[[], grpc.ChannelCredentials] | None = None
    server_name: str = ""

    def options(self) -> list[tuple[str, int | str]]:
        """gRPC channel arguments."""
        options: list[tuple[str, int | str]] = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", int(self.keepalive_interval * 1000)),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 5_000),
            ("grpc.enable_retries", 0),
            # A proxy from the environment is meant for the web, not for the fleet.
            ("grpc.enable_http_proxy", 0),
            # One connection a worker, not one shared by every channel of the process.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self.server_name:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        return options

    def open(self, address: str) -> grpc.aio.Channel:
        """A channel to HOST:PORT, which connects when it is first used."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options=self.options())
        return grpc.aio.secure_channel(address, self.credentials(), options=self.options())
