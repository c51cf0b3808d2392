"""How many tokens a text has, for prompts that come untokenised."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from tokenizers import Tokenizer

from router.observe.logging import get_logger

_log = get_logger("fleet")


class UnreadableTokenizer(Exception):
    """The tokenizer.json is none, or of a form that is not known here."""


@dataclass(frozen=True)
class TokenCounter:
    """Counts with the model's own tokenizer.json, which is read at the first use.

    Every use raises `UnreadableTokenizer` for one that cannot be read.
    """

    tokenizer_json: bytes = field(repr=False)

    @cached_property
    def _read(self) -> Tokenizer | None:
        # Also of one that cannot be read it is known from now on: it may be megabytes.
        try:
            return Tokenizer.from_str(self.tokenizer_json.decode("utf-8"))
        except Exception as error:  # the library raises nothing more special
            _log.warning("tokenizer_unreadable", why=str(error))
            return None

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._read is None:
            raise UnreadableTokenizer
        return self._read

    @cached_property
    def _longest(self) -> int:
        """Most characters that one token can stand for."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def count(self, text: str, *, enough: int) -> int:
        """The number of tokens of `text`; a lower bound once that is above `enough`.

        Blocks, for long texts in proportion to their length, so a text that
        cannot fit whatever its tokens are is not tokenised at all.
        """
        ids = self.ids(text, enough=enough)
        return len(text) // max(1, self._longest) if ids is None else len(ids)

    def ids(self, text: str, *, enough: int) -> list[int] | None:
        """The tokens of `text`, as the model's workers see it; None where they are surely
        more than `enough`. Blocks like `count`.
        """
        if len(text) // max(1, self._longest) > enough:
            return None
        found: list[int] = self._tokenizer.encode(text).ids
        return found
