"""What a worker is and can do, read from GetModelInfo and GetServerInfo."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from google.protobuf.message import Message

from router.wire import engine

# Most characters of a name, which becomes a label of metrics and a cell of tables.
_LONGEST_NAME = 512
_NAMES = (
    "mm_processor",
    "multimodal_encoder_dtype",
    "shm_namespace_id",
    "kv_connector",
    "kv_role",
    "kv_engine_id",
    "kv_cache_dtype",
    "attention_backend",
    "model_dtype",
    "pairing_protocol",
)
# Digits of a number of items.
_LONGEST_COUNT = 9


# What the two workers of a prefill/decode pair must have alike.
AGREED = ("kv_connector", "kv_cache_dtype", "block_size", "attention_backend", "model_dtype")


@dataclass(frozen=True)
class Capability:
    """A worker's own statement. Empty, 0 or None is "not known", never "none".

    `context_length` is in tokens, `encoder_budget` in feature tokens of one
    media item, `item_limits` in items of a modality per prompt.
    """

    served_name: str
    model_path: str
    model_type: str
    architectures: tuple[str, ...]
    context_length: int | None
    vocab_size: int | None
    # Media references
    mm_processor: str
    schemes: frozenset[str]
    # Tensors
    device_normalize: bool
    encoder_dtype: str
    item_limits: Mapping[str, int]
    encoder_budget: int | None
    shm_namespace: str
    # Scheduling
    max_num_seqs: int | None
    block_size: int | None
    data_parallel_size: int
    # Prefill/decode
    kv_connector: str
    kv_role: str
    kv_engine_id: str
    kv_cache_dtype: str
    attention_backend: str
    model_dtype: str
    pairing_protocol: str

    @property
    def takes_media_refs(self) -> bool:
        """Whether the worker fetches and processes media by itself."""
        return bool(self.mm_processor)

    @cached_property
    def pairing(self) -> tuple[object, ...]:
        """Equal for workers that fit the same ones as the other half of a pair."""
        agreed = (getattr(self, name) for name in AGREED)
        return *agreed, self.pairing_protocol, bool(self.kv_engine_id)

    @classmethod
    def from_info(
        cls, model: engine.GetModelInfoResponse, server: engine.GetServerInfoResponse
    ) -> Capability:
        """Reads the two answers. Raises ValueError when the item limits are malformed, or
        what should be a name is none.
        """
        _check_names(model, ("served_model_name", "model_path", "model_type"))
        _check_names(server, _NAMES)
        if not (model.served_model_name or model.model_path):
            raise ValueError("GetModelInfo names no model")
        return cls(
            served_name=model.served_model_name or model.model_path,
            model_path=model.model_path,
            model_type=model.model_type,
            architectures=tuple(model.architectures),
            context_length=model.max_context_length or None,
            vocab_size=model.vocab_size or None,
            mm_processor=server.mm_processor,
            schemes=frozenset(
                scheme.strip().lower()
                for scheme in server.mm_media_ref_schemes.split(",")
                if scheme.strip()
            ),
            device_normalize=server.mm_device_do_normalize,
            encoder_dtype=server.multimodal_encoder_dtype.removeprefix("torch."),
            item_limits=MappingProxyType(parse_item_limits(server.mm_item_limits)),
            encoder_budget=_known(server.mm_encoder_budget),
            shm_namespace=server.shm_namespace_id,
            max_num_seqs=_known(server.max_num_seqs),
            block_size=_known(server.block_size),
            data_parallel_size=max(1, server.data_parallel_size),
            kv_connector=server.kv_connector,
            kv_role=server.kv_role,
            kv_engine_id=server.kv_engine_id,
            kv_cache_dtype=server.kv_cache_dtype,
            attention_backend=server.attention_backend,
            model_dtype=server.model_dtype.removeprefix("torch."),
            pairing_protocol=server.pairing_protocol,
        )


def _check_names(answer: Message, fields: Iterable[str]) -> None:
    for field in fields:
        name = getattr(answer, field)
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise ValueError(f"{field} is not a name")


def _known(number: int) -> int | None:
    """A number above 0, which stands for "not known" as those below do."""
    return number if number > 0 else None


def parse_item_limits(text: str) -> dict[str, int]:
    """`{"image": 8, "video": 2}` from `image=8,video=2`. Raises ValueError."""
    limits: dict[str, int] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        modality, equals, count = pair.partition("=")
        if not equals or not count.strip().isdecimal() or len(count) > _LONGEST_COUNT:
            raise ValueError(f"not an item limit: {pair!r}")
        limits[modality.strip().lower()] = int(count)
    return limits
