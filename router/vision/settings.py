"""Reading a processor's settings without guessing.

A value that the file holds is used; one that is needed and missing is an
error; one that nobody read and that could change pixels is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.vision.files import Settings
from router.vision.values import Formula, Normalization, read_normalization

# Keys that say who wrote the file or how its library is called.
_HARMLESS = frozenset(
    {
        "_processor_class",
        "auto_map",
        "data_format",
        "default_to_square",
        "device",
        "disable_grouping",
        "do_convert_rgb",
        "feature_extractor_type",
        "image_processor_type",
        "input_data_format",
        "processor_class",
        "return_metadata",
        "return_tensors",
        "transformers_version",
        "video_metadata",
        "video_processor_type",
    }
)


class Reader:
    """One settings mapping; remembers which keys were asked for."""

    def __init__(self, settings: Settings, where: str) -> None:
        self._settings = settings
        self._where = where
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        """The raw value; None where it is missing or null."""
        self._read.add(key)
        return self._settings.get(key)

    def positive(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises ValueError where it is missing without a default."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise ValueError(f"{self._where}: {key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{self._where}: {key} is not a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number. Raises ValueError where it is missing without a default."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise ValueError(f"{self._where}: {key} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise ValueError(f"{self._where}: {key} is not a positive number")
        return float(value)

    def switch(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self._where}: {key} is not true or false")
        return value

    def only(self, key: str, *allowed: object) -> None:
        """Raise ValueError where `key` is set to something else than `allowed`."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise ValueError(f"{self._where}: {key} {value!r} is not supported")

    def excludes(self, key: str, other: str) -> None:
        """Raise ValueError where both `key` and `other` are set."""
        if self.get(key) is not None and self.get(other) is not None:
            raise ValueError(f"{self._where}: {key} and {other} exclude each other")

    def nested(self, key: str) -> Reader:
        """The mapping under `key`, empty where it is missing."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._where}: {key} is not an object")
        return Reader(value, f"{self._where}: {key}")

    def side(self, key: str) -> int:
        """The side of a square given as {height, width}, {shortest_edge} or a number."""
        value = self.get(key)
        if isinstance(value, int):
            return self.positive(key)
        inner = self.nested(key)
        if inner.get("shortest_edge") is not None:
            return inner.positive("shortest_edge")
        height, width = inner.positive("height"), inner.positive("width")
        if height != width:
            raise ValueError(f"{self._where}: {key} is not a square")
        return height

    def target(self, key: str) -> tuple[int] | tuple[int, int]:
        """What a picture is resized to: (shorter side,) with its shape kept, or (height, width).

        A bound on the longer side beside the shorter one is not supported.
        """
        value = self.get(key)
        if isinstance(value, int):
            return (self.positive(key),)
        inner = self.nested(key)
        if inner.get("shortest_edge") is None:
            return inner.positive("height"), inner.positive("width")
        inner.only("longest_edge")
        return (inner.positive("shortest_edge"),)

    def normalization(self, formula: Formula = "fused") -> Normalization:
        self._read |= {"do_rescale", "do_normalize", "rescale_factor", "image_mean", "image_std"}
        return read_normalization(self._settings, self._where, formula)

    def warnings(self) -> tuple[str, ...]:
        """One sentence for each set key that nobody asked for."""
        return tuple(
            f"{self._where}: {key} is not understood and was ignored"
            for key, value in sorted(self._settings.items())
            if key not in self._read and key not in _HARMLESS and value is not None
        )


def model_token(config: Settings, token_ids: Mapping[str, int], key: str, text: str) -> int:
    """The id of a special token: config.json's `key`, else the added token `text`.

    Raises ValueError where neither knows it, or where they contradict.
    """
    from_config = config.get(key)
    from_tokenizer = token_ids.get(text)
    if from_config is None and from_tokenizer is None:
        raise ValueError(f"neither config.json ({key}) nor tokenizer.json ({text}) has the token")
    if from_config is None:
        return int(from_tokenizer or 0)
    if isinstance(from_config, bool) or not isinstance(from_config, int) or from_config < 0:
        raise ValueError(f"config.json: {key} is not a token id")
    if from_tokenizer is not None and from_tokenizer != from_config:
        raise ValueError(f"config.json ({key}) and tokenizer.json ({text}) give different ids")
    return from_config


def shrunk(
    width: int, height: int, max_long_side: int | None, multiple: int = 1
) -> tuple[int, int]:
    """(width, height) as though the picture had been shrunk to `max_long_side`.

    The bound goes down to a multiple of `multiple`, so that rounding a side to
    the nearest multiple does not lead past what was asked.
    """
    longest = max(width, height)
    if max_long_side is None:
        return width, height
    bound = max(max_long_side // multiple * multiple, multiple)
    if longest <= bound:
        return width, height
    return max(1, round(width * bound / longest)), max(1, round(height * bound / longest))
