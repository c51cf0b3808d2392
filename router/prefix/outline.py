"""Reads what a worker did with the media of a prompt from the blocks that it reports.

Before a worker has fetched them, a prompt's items are gaps between tokens that
are known. In reported blocks each item is called by the worker's own
identifier, with its offset: where the known tokens fit around it, that is this
item's name, and the tokens in the gap are those that stand for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from router.prefix.blocks import PromptBlocks, Tokens
from router.prefix.changes import Stored


@dataclass(frozen=True)
class Outline:
    """A prompt whose media are not all known.

    `blocks` is the prompt as it is estimated to be, of which the first `sure`
    tokens, and the media in them, are as the worker has them. `parts` are the
    tokens before each item and after the last, which are known in any case.
    """

    blocks: PromptBlocks
    sure: int

    @property
    def items(self) -> int:
        return len(self.blocks.media)

    def part(self, k: int) -> Tokens:
        """The known tokens before item k; for k = `items` those after the last."""
        media, tokens = self.blocks.media, self.blocks.tokens
        begin = media[k - 1].offset + media[k - 1].length if k else 0
        return tokens[begin : media[k].offset] if k < len(media) else tokens[begin:]

    def last_token(self, k: int) -> int:
        """The one that ends item k's placeholder range, whatever its length."""
        span = self.blocks.media[k]
        return int(self.blocks.tokens[span.offset + span.length - 1])


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

    `tokens` is uint32 [n * size]; `names` has (block, identifier, offset from
    the block's first token) rows in their order.
    """

    start: int
    size: int
    tokens: Tokens
    names: tuple[tuple[int, str, int], ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def at(self, begin: int, end: int) -> Tokens:
        """Those of the prompt's tokens [begin, end) that are in these blocks."""
        return self.tokens[max(0, begin - self.start) : max(0, end - self.start)]

    def agrees(self, known: Tokens, at: int) -> bool:
        """Whether `known` can be the prompt's tokens from `at` on."""
        skipped = max(0, self.start - at)
        seen = self.at(at, at + len(known))
        return bool(np.array_equal(seen, known[skipped : skipped + len(seen)]))

    def until(self, length: int) -> Reported:
        """The blocks that lie within a prompt of so many tokens."""
        blocks = max(0, min(self.end, length) - self.start) // self.size
        names = tuple(row for row in self.names if row[0] < blocks)
        return Reported(self.start, self.size, self.tokens[: blocks * self.size], names)

    def followed_by(self, stored: Stored) -> Reported:
        """With a run whose parent is the last of these blocks."""
        shift = len(self.tokens) // self.size
        names = tuple((shift + block, name, offset) for block, name, offset in rows(stored))
        tokens = np.concatenate([self.tokens, stored.tokens])
        return Reported(self.start, self.size, tokens, self.names + names)

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
    return Reported(start, stored.block_size, stored.tokens, tuple(rows(stored)))


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
        if not seen.agrees(outline.part(k), at):
            return None
        at += len(outline.part(k))
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
            found[k] = Item(mention.identifier, at, None)
            # What follows cannot be placed, but for what the next item's offset tells.
            return found
        (end,) = ends
        found[k] = Item(mention.identifier, at, _placeholders(outline, k, seen, at, end))
        at = end
    if mentions or not seen.agrees(outline.part(outline.items), at):
        return None
    if length and at + len(outline.part(outline.items)) != length:
        return None
    return found


def _ends(
    outline: Outline,
    k: int,
    seen: Reported,
    mention: Mention,
    following: Sequence[Mention],
    length: int,
) -> list[int]:
    """Where item k may end, as offsets in the prompt."""
    part, last = outline.part(k + 1), outline.last_token(k)
    first = max(mention.offset, mention.begin) + 1
    if following:
        ends = [following[0].offset - len(part)]
    elif length and k + 1 == outline.items:
        ends = [length - len(part)]
        if ends[0] > mention.end == seen.end:
            return ends
    elif len(part):
        # Where the item's last token is followed by the first one after it.
        lasts = seen.at(first - 1, min(mention.end, seen.end - 1))
        nexts = seen.at(first, mention.end + 1)
        ends = (first + np.flatnonzero((lasts == last) & (nexts == part[0]))).tolist()
    else:
        ends = list(range(first, mention.end + 1))
    return [
        end
        for end in ends
        if first <= end <= mention.end
        and int(seen.tokens[end - 1 - seen.start]) == last
        and seen.agrees(part, end)
    ]


def _placeholders(outline: Outline, k: int, seen: Reported, begin: int, end: int) -> Tokens | None:
    tokens = seen.at(begin, end)
    if end <= seen.end:
        return tokens.copy()
    # The rest is in a block that is not full. Of a plain run it can only be more of the same.
    last = outline.last_token(k)
    return np.full(end - begin, last, np.uint32) if (tokens == last).all() else None
