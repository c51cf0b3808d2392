"""A model as the fleet serves it: its files, and how its media become tensors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from router.fleet.bundle import TokenizerBundle, digest
from router.fleet.capability import Capability
from router.fleet.tokens import TokenCounter
from router.observe.logging import get_logger
from router.vision.files import ModelFiles
from router.vision.plan import ModelSpec
from router.vision.registry import spec_for

_log = get_logger("fleet")

# What decides a model's tensors and token ids.
_DECIDING_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "video_preprocessor_config.json",
)


@dataclass(frozen=True)
class Model:
    """`spec` is None for a model without media, or one whose family is not known;
    `problem` says why a known family cannot be served. `fingerprint` is equal
    for workers whose files lead to the same tensors and token ids.
    """

    bundle: TokenizerBundle = field(repr=False)
    fingerprint: str
    spec: ModelSpec | None
    problem: str = ""
    # None where the worker hands out no tokenizer.json.
    counter: TokenCounter | None = None
    # What a worker's tokenizer reads as a media anchor, in a prompt that comes as text.
    anchor_texts: tuple[str, ...] = ()
    # Token ids that end an answer, by generation_config.json.
    end_ids: frozenset[int] = frozenset()


class ModelLibrary:
    """Models by what their files and type are, so that equal workers share one.

    One is kept for as long as anybody has it: files are megabytes, and a fleet
    that is renewed for months has many of them.
    """

    def __init__(self) -> None:
        self._models: WeakValueDictionary[tuple[str, str, tuple[str, ...]], Model]
        self._models = WeakValueDictionary()
        # A fleet that starts has many equal workers at once.
        self._reading = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._models)

    async def model(self, capability: Capability, bundle: TokenizerBundle) -> Model:
        """The model of a worker. Reading the files takes a while, so it is done in a thread."""
        key = (bundle.content, capability.model_type, capability.architectures)
        async with self._reading:
            model = self._models.get(key)
            if model is None:
                model = await asyncio.to_thread(_read, capability, bundle)
                self._models[key] = model
                _tell(capability, model)
        return model


def fingerprint(files: Mapping[str, bytes]) -> str:
    """Hex SHA-256 over the files that decide a model's tensors and token ids."""
    return digest({name: files.get(name, b"") for name in _DECIDING_FILES})


def _tell(capability: Capability, model: Model) -> None:
    if model.problem:
        _log.warning("model_not_usable", model=capability.served_name, why=model.problem)
    if model.spec is not None:
        for warning in model.spec.warnings:
            _log.warning("model_setting", model=capability.served_name, setting=warning)


def _read(capability: Capability, bundle: TokenizerBundle) -> Model:
    spec, problem = None, ""
    anchor_texts: tuple[str, ...] = ()
    try:
        files = ModelFiles.from_archive(bundle.files)
        spec = spec_for(capability.model_type, capability.architectures, files)
        if spec is not None:
            anchors = set(spec.anchor_ids.values())
            anchor_texts = tuple(text for text, id_ in files.token_ids.items() if id_ in anchors)
    except ValueError as error:
        problem = str(error)
    tokenizer = bundle.files.get("tokenizer.json")
    counter = TokenCounter(tokenizer) if tokenizer else None
    ends = _end_ids(bundle.files.get("generation_config.json", b""))
    return Model(bundle, fingerprint(bundle.files), spec, problem, counter, anchor_texts, ends)


def _end_ids(generation_config: bytes) -> frozenset[int]:
    """`eos_token_id`, which is one or several; nothing where the file is not as it should be."""
    try:
        config = json.loads(generation_config)
    except (ValueError, RecursionError):
        return frozenset()
    named = config.get("eos_token_id") if isinstance(config, dict) else None
    several = named if isinstance(named, list) else [named]
    return frozenset(token for token in several if isinstance(token, int))
