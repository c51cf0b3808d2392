"""Reads what a worker did with the media of a prompt from the blocks that it reports.

Before a worker has fetched them, a prompt's items are gaps between tokens that
are known. In reported blocks each item is called by the worker's own
identifier, with its offset: where the known tokens fit around it, that is this
item's name, and the tokens in the gap are those that stand for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from router.prefix.blocks import PromptBlocks, Tokens
from router.prefix.changes import Stored

# Tokens are compared as bytes, which for some hundred of them is the quickest by far.
_WIDTH = np.dtype(np.uint32).itemsize


@dataclass(frozen=True)
class Outline:
    """A prompt whose media are not all known.

    `blocks` is the prompt as it is estimated to be, of which the first `sure`
    tokens, and the media in them, are as the worker has them.
    """

    blocks: PromptBlocks
    sure: int

    @property
    def items(self) -> int:
        return len(self.blocks.media)

    @cached_property
    def parts(self) -> tuple[bytes, ...]:
        """The tokens before each item, and after the last, which are known in any case."""
        raw, media = self.blocks.tokens.tobytes(), self.blocks.media
        begins = [0, *(span.offset + span.length for span in media)]
        ends = [*(span.offset for span in media), len(self.blocks.tokens)]
        return tuple(raw[_WIDTH * i : _WIDTH * j] for i, j in zip(begins, ends, strict=True))

    @cached_property
    def lasts(self) -> tuple[bytes, ...]:
        """The token that ends each item's placeholder range, whatever its length."""
        ends = [span.offset + span.length - 1 for span in self.blocks.media]
        return tuple(self.blocks.tokens[end].tobytes() for end in ends)

    def after(self, parent: int, size: int) -> int | None:
        """The token behind the block of this key, if it is one of those that are sure."""
        keys = self.blocks.keys(size)[: self.sure // size]
        raw, wanted = keys.tobytes(), np.uint64(parent).tobytes()
        at = raw.find(wanted)
        while at % keys.itemsize and at >= 0:
            at = raw.find(wanted, at + 1)
        return (at // keys.itemsize + 1) * size if at >= 0 else None


@dataclass(frozen=True)
class Mention:
    """An item as blocks have it: named in those that overlap it, the last of which is [begin, end).

    `offset` counts from the start of the prompt.
    """

    identifier: str
    offset: int
    begin: int
    end: int


@dataclass(frozen=True)
class Reported:
    """Consecutive blocks of `size` tokens of one prompt, the first at its token `start`.

    `raw` is their tokens, uint32 [n * size]; `names` has (block, identifier, offset from
    the block's first token) rows in their order.
    """

    start: int
    size: int
    raw: bytes
    names: tuple[tuple[int, str, int], ...]

    @property
    def end(self) -> int:
        return self.start + len(self.raw) // _WIDTH

    def at(self, begin: int, end: int) -> bytes:
        """Those of the prompt's tokens [begin, end) that are in these blocks."""
        return self.raw[_WIDTH * max(0, begin - self.start) : _WIDTH * max(0, end - self.start)]

    def agrees(self, known: bytes, at: int) -> bool:
        """Whether `known` can be the prompt's tokens from `at` on."""
        seen = self.at(at, at + len(known) // _WIDTH)
        skipped = _WIDTH * max(0, self.start - at)
        return seen == known[skipped : skipped + len(seen)]

    def until(self, length: int) -> Reported:
        """The blocks that lie within a prompt of so many tokens."""
        blocks = max(0, min(self.end, length) - self.start) // self.size
        if blocks == (self.end - self.start) // self.size:
            return self
        names = tuple(row for row in self.names if row[0] < blocks)
        return Reported(self.start, self.size, self.raw[: _WIDTH * blocks * self.size], names)

    def followed_by(self, stored: Stored) -> Reported:
        """With a run whose parent is the last of these blocks."""
        shift = (self.end - self.start) // self.size
        names = tuple((shift + block, name, offset) for block, name, offset in rows(stored))
        raw = self.raw + stored.tokens.tobytes()
        return Reported(self.start, self.size, raw, self.names + names)

    @cached_property
    def mentions(self) -> tuple[Mention, ...]:
        """The items in the order of the prompt."""
        found: dict[tuple[str, int], Mention] = {}
        for block, identifier, relative in self.names:
            begin = self.start + block * self.size
            offset = begin + relative
            found[identifier, offset] = Mention(identifier, offset, begin, begin + self.size)
        return tuple(found.values())


def rows(stored: Stored) -> Iterator[tuple[int, str, int]]:
    """The (block, identifier, offset from the block's first token) of a run."""
    extras = stored.extras
    if extras is not None:
        for block in range(len(extras.starts) - 1):
            for row in range(extras.starts[block], extras.starts[block + 1]):
                yield block, extras.identifiers[row], int(extras.offsets[row])


def reported(stored: Stored, start: int) -> Reported:
    """A run that begins at token `start` of its prompt."""
    return Reported(start, stored.block_size, stored.tokens.tobytes(), tuple(rows(stored)))


@dataclass(frozen=True)
class Item:
    """What blocks tell of an item that begins in them, at token `offset` of the prompt.

    `tokens` (uint32) is its placeholder range; None where its end is not to be
    seen.
    """

    identifier: str
    offset: int
    tokens: Tokens | None


def read(outline: Outline, seen: Reported, length: int = 0) -> dict[int, Item] | None:
    """The items that begin in these blocks, by their place in the prompt.

    None where the blocks are of another prompt. `length` is that of the whole
    prompt in tokens, 0 while nobody has said it.
    """
    spans, mentions = outline.blocks.media, deque(seen.mentions)
    # Blocks begin where the outline is sure, so what lies before is as it has it.
    before = sum(span.offset < seen.start for span in spans)
    at = spans[before - 1].offset + spans[before - 1].length if before else 0
    if mentions and mentions[0].offset < seen.start:
        first = mentions.popleft()
        if not before or at <= seen.start:
            return None
        span = spans[before - 1]
        if (first.identifier, first.offset) != (span.identifier, span.offset):
            return None
    elif at > seen.start:
        return None
    found: dict[int, Item] = {}
    for k in range(before, outline.items):
        if not seen.agrees(outline.parts[k], at):
            return None
        at += len(outline.parts[k]) // _WIDTH
        if at >= seen.end:
            return None if mentions else found
        if not mentions or mentions[0].offset != at:
            return None
        mention = mentions.popleft()
        ends = _ends(outline, k, seen, mention, mentions, length)
        told = length and k + 1 == outline.items
        if not ends and (mention.end < seen.end or mentions or told):
            return None
        if len(ends) != 1:
            # What follows cannot be placed.
            found[k] = Item(mention.identifier, at, None)
            return found
        (end,) = ends
        found[k] = Item(mention.identifier, at, _placeholders(outline, k, seen, at, end))
        at = end
    last = outline.parts[outline.items]
    if mentions or not seen.agrees(last, at):
        return None
    return None if length and at + len(last) // _WIDTH != length else found


def _ends(
    outline: Outline,
    k: int,
    seen: Reported,
    mention: Mention,
    following: Sequence[Mention],
    length: int,
) -> list[int]:
    """Where item k may end, as offsets in the prompt."""
    part, last = outline.parts[k + 1], outline.lasts[k]
    first = max(mention.offset, mention.begin) + 1
    ends: Iterable[int]
    if following:
        ends = [following[0].offset - len(part) // _WIDTH]
    elif length and k + 1 == outline.items:
        end = length - len(part) // _WIDTH
        if end > mention.end == seen.end:
            return [end]
        ends = [end]
    elif part:
        # Where the item's last token is followed by the first one after it.
        border = seen.at(first - 1, mention.end + 1)
        ends = (first + at for at in _all_aligned(border, last + part[:_WIDTH]))
    else:
        ends = range(first, mention.end + 1)
    return [
        end
        for end in ends
        if first <= end <= mention.end and seen.at(end - 1, end) == last and seen.agrees(part, end)
    ]


def _placeholders(outline: Outline, k: int, seen: Reported, begin: int, end: int) -> Tokens | None:
    tokens = np.frombuffer(seen.at(begin, end), np.uint32)
    if end <= seen.end:
        return tokens
    # The rest is in a block that is not full. Of a plain run it can only be more of the same.
    (last,) = np.frombuffer(outline.lasts[k], np.uint32)
    return np.full(end - begin, last, np.uint32) if (tokens == last).all() else None


def _all_aligned(raw: bytes, pattern: bytes) -> Iterator[int]:
    """The positions of a pattern of two tokens, in tokens."""
    at = raw.find(pattern)
    while at >= 0:
        if at % _WIDTH == 0:
            yield at // _WIDTH
        at = raw.find(pattern, at + 1)
