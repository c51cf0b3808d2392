"""Counting the ids of a stream without parsing its messages.

What workers say of their own counts differs from kind to kind, so the ids
themselves are counted. They stand in each chunk in one packed run of varints;
that run is set aside and counted once, when the stream is over.
"""

from __future__ import annotations

from router.wire import engine

# Field 1, length-delimited: GenerateResponse.chunk, and in it token_ids.
_FIELD_1 = 0x0A
# A varint goes on for as long as its bytes have the highest bit.
_CONTINUED = bytes(range(0x80, 0x100))


class TokenTally:
    """Token ids seen in the chunks of a stream."""

    __slots__ = ("_counted", "_runs")

    def __init__(self) -> None:
        self._runs = bytearray()
        self._counted = 0

    def add(self, message: bytes) -> None:
        """Takes a GenerateResponse that holds a chunk. Raises DecodeError for what is none."""
        # The usual form: a chunk and nothing else, not long, that begins with a short run of ids.
        size = len(message)
        if size > 5 and (message[1] < 0x80 or message[2] < 0x80):
            at, told = 2, message[1]
            if told >= 0x80:
                at, told = 3, told & 0x7F | message[2] << 7
            length = message[at + 1]
            if told == size - at and message[at] == _FIELD_1 and length < min(0x80, told - 1):
                self._runs += message[at + 2 : at + 2 + length]
                return
        self._counted += len(engine.GenerateResponse.FromString(message).chunk.token_ids)

    @property
    def tokens(self) -> int:
        """How many ids there were so far."""
        return self._counted + len(self._runs.translate(None, _CONTINUED))
