"""What a vLLM worker behind the router can be told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import gettempdir


class MmProcessor(Enum):
    """Who turns media into tensors when the router passes references on."""

    # Nobody: the worker takes tensors only, and says so in its GetServerInfo.
    OFF = "off"
    # vLLM's own processor, in the worker's process.
    INPROCESS = "inprocess"
    # vLLM's own processor, in a sidecar behind Redis.
    REDIS = "redis"


class OptionsError(ValueError):
    """The options cannot work; the message is one sentence."""


@dataclass(frozen=True)
class WorkerOptions:
    """One worker. Times are in seconds.

    `kv_events` is the ZMQ endpoint on which the engine publishes its KV events
    for its own servicer ("" publishes none). `extra` goes to `vllm serve` as it
    is and wins over everything here.
    """

    model: Path
    python: Path
    host: str = "127.0.0.1"
    port: int = 50051
    served_model_name: str = ""
    mm_processor: MmProcessor = MmProcessor.INPROCESS
    redis_url: str = ""
    kv_events: str = ""
    allowed_media_domains: tuple[str, ...] = ()
    media_local_root: Path | None = None
    pairing_protocol: str = ""
    start_timeout: float = 1800.0
    stop_timeout: float = 30.0
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model.name

    @property
    def address(self) -> str:
        """Where the worker can be reached from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def check(self) -> None:
        """Raises OptionsError for what vLLM would only notice after loading the model."""
        if not self.model.is_dir():
            raise OptionsError(
                f"{self.model} is not a folder on this machine; a worker can hand its tokenizer "
                "to the router only from a folder, so download the model first and name that"
            )
        if not (self.model / "config.json").is_file():
            raise OptionsError(f"{self.model} holds no config.json, so it is not a model")
        if self.redis_url and self.mm_processor is not MmProcessor.REDIS:
            raise OptionsError("--redis-url needs --mm-processor redis")
        self._check_kv_events()
        if self.media_local_root and not self.media_local_root.is_dir():
            raise OptionsError(f"--media-local-root {self.media_local_root} is not a folder")

    def _check_kv_events(self) -> None:
        if self.kv_events.startswith("tcp://"):
            # vLLM takes a named host for a broker to connect to, and then nobody listens.
            if "*" not in self.kv_events and "::" not in self.kv_events:
                raise OptionsError(
                    f"--kv-events {self.kv_events} names a host, so vLLM would connect to it "
                    "instead of listening; write tcp://*:PORT"
                )
        elif self.kv_events and not self.kv_events.startswith("ipc://"):
            raise OptionsError(
                f"--kv-events {self.kv_events} is neither ipc://PATH nor tcp://*:PORT"
            )
        elif self.kv_events and any(flag.startswith("--data-parallel") for flag in self.extra):
            raise OptionsError(
                "a data-parallel engine publishes on one TCP port a rank, "
                "so it needs --kv-events tcp://*:PORT"
            )


def kv_events_socket(port: int) -> str:
    """An endpoint for the worker that serves on `port`, out of the network's reach."""
    return f"ipc://{Path(gettempdir()) / f'mmrouter-vllm-{port}-kv-events'}"
