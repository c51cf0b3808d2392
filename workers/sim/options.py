"""Everything about a simulated worker that its user can choose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workers.sim.faults import parse_rule

Style = Literal["python", "rust"]


@dataclass(frozen=True)
class SimOptions:
    """What the worker claims to be, how fast it is, and what goes wrong in it.

    Durations are seconds, rates are tokens per second. The defaults describe a
    Qwen3-VL worker that takes media references and answers without delay.
    """

    # ---- The model ----
    model: str = "sim/Qwen3-VL"
    # What clients ask for; empty for the same as `model`.
    served_model: str = ""
    # qwen3_vl, qwen2_5_vl, qwen2_vl see pictures; any other name is text only.
    model_type: str = "qwen3_vl"
    max_context: int = 262_144
    # Smallest and largest area in pixels of a resized picture; None for the family's own.
    min_pixels: int | None = None
    max_pixels: int | None = None

    # ---- What it advertises about media ----
    # "inprocess", or "" for a worker that takes no references.
    mm_processor: str = "inprocess"
    # `file` counts only with a `local_root`.
    mm_schemes: tuple[str, ...] = ("data", "file", "http", "https")
    # True: wants raw 0..255 pixels and normalises them itself.
    device_normalize: bool = True
    encoder_dtype: str = "bfloat16"
    # Items per prompt and modality; a modality that is missing has no limit.
    item_limits: tuple[tuple[str, int], ...] = (("image", 16), ("video", 2))
    # The most feature tokens of one item; 0 for none advertised.
    encoder_budget: int = 16_384
    # file: references may name files below this directory; None refuses them.
    local_root: Path | None = None
    media_timeout: float = 5.0

    # ---- Scheduling ----
    max_num_seqs: int = 64
    # Requests that may wait before the next is refused; None for max_num_seqs.
    max_waiting: int | None = None
    # 0 for a prefill that takes no time.
    prefill_rate: float = 0.0
    time_per_output_token: float = 0.0
    tokens_per_chunk: int = 1

    # ---- KV cache ----
    block_size: int = 16
    kv_blocks: int = 65_536
    prefix_caching: bool = True
    kv_events: bool = True
    heartbeat: float = 1.0
    encoder_cache_items: int = 1_024

    # ---- Pairing and transport ----
    kv_role: str = ""
    kv_connector: str = ""
    kv_engine_id: str = ""
    kv_cache_dtype: str = "auto"
    attention_backend: str = "SIM"
    model_dtype: str = "bfloat16"
    pairing_protocol: str = ""
    shm_namespace_id: str = ""
    data_parallel_size: int = 1
    # HOST:PORT at which a Mooncake prefill worker hands over; empty for none.
    bootstrap: str = ""
    # How long a decode worker waits for its transfer.
    transfer_timeout: float = 30.0
    # Whether a prefill of media references says what they were.
    media_identity: bool = True
    # Decodes whatever was handed over, and tells nobody that it is not what was asked for.
    gullible: bool = False

    # ---- Manners and trouble ----
    # Whose message style it has: the Python servicer's or the Rust one's.
    style: Style = "python"
    # Seconds after the port opened in which health says NOT_SERVING.
    warmup: float = 0.0
    # Whether malformed tensors end the engine for good, as they do in a real one.
    mortal: bool = True
    # Rules as `faults.parse_rule` reads them.
    faults: tuple[str, ...] = ()
    # How many of the last requests stay open to inspection.
    record_requests: int = 100

    def __post_init__(self) -> None:
        for name in ("max_context", "max_num_seqs", "tokens_per_chunk", "block_size", "kv_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            "prefill_rate",
            "time_per_output_token",
            "warmup",
            "media_timeout",
            "transfer_timeout",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} cannot be negative: {getattr(self, name)}")
        if self.heartbeat <= 0:
            raise ValueError(f"heartbeat must be above 0, not {self.heartbeat}")
        if self.style not in ("python", "rust"):
            raise ValueError(f"style must be python or rust, not {self.style!r}")
        for rule in self.faults:
            parse_rule(rule)

    @property
    def served_name(self) -> str:
        return self.served_model or self.model

    @property
    def schemes(self) -> tuple[str, ...]:
        """The URL schemes that it takes, and says so."""
        return tuple(s for s in self.mm_schemes if s != "file" or self.local_root is not None)

    @property
    def waiting_limit(self) -> int:
        return self.max_num_seqs if self.max_waiting is None else self.max_waiting

    def item_limit(self, modality: str) -> int | None:
        """The most items of `modality` ("image", "video") in one prompt."""
        return dict(self.item_limits).get(modality)
