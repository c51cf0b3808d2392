"""What a worker's own files say about its model.

The router keeps no model files: everything it knows about a model's pictures
comes out of the archive that the worker itself hands over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from tokenizers import Tokenizer

Settings = Mapping[str, Any]
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class ModelFiles:
    """The parsed settings of one model; a file that is missing is an empty mapping.

    `image_file` and `video_file` name the file that the image and the video
    processor's settings stand in, for messages.
    `token_ids` maps the text of each added token of tokenizer.json to its id.
    `encode` turns plain text into ids without special tokens; only video
    timestamps need it.
    """

    config: Settings = field(default_factory=dict)
    preprocessor_config: Settings = field(default_factory=dict)
    video_preprocessor_config: Settings = field(default_factory=dict)
    processor_config: Settings = field(default_factory=dict)
    image_file: str = "preprocessor_config.json"
    video_file: str = "video_preprocessor_config.json"
    token_ids: Mapping[str, int] = field(default_factory=dict)
    encode: Encode | None = field(default=None, compare=False)

    @classmethod
    def from_archive(cls, files: Mapping[str, bytes]) -> ModelFiles:
        """Parse the members of a GetTokenizer archive by name.

        Where the settings of a processor stand twice, the reference's order
        counts: nested in processor_config.json, as newer checkpoints have them,
        before a file of their own; a video processor without either has the
        image processor's file. Raises ValueError, naming the file, for one that
        is not a JSON object.
        """
        processor = _settings(files, "processor_config.json")
        image = _settings(files, "preprocessor_config.json")
        video = _settings(files, "video_preprocessor_config.json")
        tokenizer = _settings(files, "tokenizer.json")
        image_file, image_settings = _first(
            ("processor_config.json: image_processor", _nested(processor, "image_processor")),
            ("preprocessor_config.json", image),
        )
        video_file, video_settings = _first(
            ("processor_config.json: video_processor", _nested(processor, "video_processor")),
            ("video_preprocessor_config.json", video),
            ("preprocessor_config.json", image),
        )
        return cls(
            config=_settings(files, "config.json"),
            preprocessor_config=image_settings,
            video_preprocessor_config=video_settings,
            processor_config=processor,
            image_file=image_file,
            video_file=video_file,
            token_ids=_added_tokens(tokenizer),
            encode=_LazyEncoder(files["tokenizer.json"]) if tokenizer else None,
        )


@dataclass(frozen=True)
class _LazyEncoder:
    """Builds the tokenizer at the first call: most models never need one here.

    A call raises ValueError where tokenizer.json holds no tokenizer.
    """

    tokenizer_json: bytes = field(repr=False)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        try:
            return Tokenizer.from_str(self.tokenizer_json.decode("utf-8"))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError("tokenizer.json cannot be read as a tokenizer") from error

    def __call__(self, text: str) -> Sequence[int]:
        return cast(Sequence[int], self._tokenizer.encode(text, add_special_tokens=False).ids)


def _settings(files: Mapping[str, bytes], name: str) -> Settings:
    raw = files.get(name)
    if raw is None:
        return {}
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} is not a JSON object")
    return parsed


def _nested(processor: Settings, key: str) -> Settings:
    inner = processor.get(key, {})
    return inner if isinstance(inner, dict) else {}


def _first(*named: tuple[str, Settings]) -> tuple[str, Settings]:
    """The first of `named` that holds something, else the last."""
    return next((one for one in named if one[1]), named[-1])


def _added_tokens(tokenizer: Settings) -> dict[str, int]:
    entries = tokenizer.get("added_tokens", [])
    if not isinstance(entries, list):
        raise ValueError("tokenizer.json: added_tokens is not a list")
    token_ids: dict[str, int] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError("tokenizer.json: an added token is not an object")
        content, token_id = entry.get("content"), entry.get("id")
        if not isinstance(content, str) or not isinstance(token_id, int) or token_id < 0:
            raise ValueError("tokenizer.json: an added token lacks its content or id")
        token_ids[content] = token_id
    return token_ids
