"""Token ids to text, piece by piece as they stream."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

# What decoders put where bytes are not (yet) UTF-8.
_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns one choice's growing ids into text that never has to be taken back.

    A character may span several tokens and a decoder may treat the first token
    of a text differently, so each step decodes a short window: the ids of the
    last piece given out, as context, and those after it. Special tokens are
    left out.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._given = 0

    @property
    def ids(self) -> list[int]:
        """All ids so far."""
        return self._ids

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; empty while a character is unfinished."""
        self._ids.extend(ids)
        piece = self._pending()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._context, self._given = self._given, len(self._ids)
        return piece

    def finish(self) -> str:
        """What is still held back, now that nothing more comes."""
        piece = self._pending()
        self._context = self._given = len(self._ids)
        return piece

    def _pending(self) -> str:
        before = self._decode(self._ids[self._context : self._given])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
