"""Learns from a worker's events what it calls media that it fetched by itself.

A request that passes references on is watched from the choice of its worker
until a moment after its end. Every run of blocks that the worker stored
meanwhile and that fits the prompt is kept. The worker computed the prompt's
last part itself, as its answer tells (all but `cached_tokens`), so the blocks
of that part were among them: if all that fit call an item by one identifier, it
is this item's. If they do not, somebody else had the same prompt with another
picture there, and nothing is learned: a missed match costs some work, a wrong
name would take one picture for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from router.prefix.changes import Stored
from router.prefix.index import Chain
from router.prefix.names import Learned, NameLimits, Names, learned
from router.prefix.outline import Item, Outline, Reported, read, reported

# Seconds after a request's end in which its last events may still come in.
BRIDGE = 1.0
# Requests watched at one worker, different blocks kept for one of them, and the pieces in
# which these may come.
_WATCHES = 64
_RUNS = 8
_PIECES = 16
# Requests decided on in one go: it takes about half a millisecond each.
_AT_ONCE = 4


@dataclass(frozen=True)
class References:
    """The media of a prompt that was passed on to a worker.

    `names` is what the router calls each item, and `certain` whether the
    worker must call it that and give it the length that it has in `outline`.
    """

    outline: Outline
    names: tuple[str, ...]
    certain: tuple[bool, ...]


class Counts(Protocol):
    """What a worker says at the end of a request: its tokens, and those found in the cache."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...


@dataclass
class Run:
    """A run of blocks that a worker stored, as those who hear of it share it."""

    stored: Stored
    chain: Chain
    _placed: dict[int, Reported] = field(default_factory=dict)

    @property
    def tail(self) -> int:
        """The key of its last block."""
        return int(self.chain.keys[-1])

    def at(self, start: int) -> Reported:
        """Its blocks, if they begin at token `start` of a prompt."""
        if start not in self._placed:
            self._placed[start] = reported(self.stored, start)
        return self._placed[start]


@dataclass(eq=False)
class Watch:
    """One request at one worker. Whoever got it closes it."""

    references: References
    _listener: Listener
    # Blocks that may be of this request, by the key of the last one: those that nothing
    # was added to, and those to which more of the prompt can be added.
    _seen: dict[int, Reported] = field(default_factory=dict)
    _open: dict[int, Reported] = field(default_factory=dict)
    _crowded: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def close(self, counts: Counts | None) -> None:
        """The request was served, with these counts by the worker; None where it was not."""
        if counts is None:
            self._listener.remove(self)
        else:
            self.prompt_tokens, self.cached_tokens = counts.prompt_tokens, counts.cached_tokens
            self._listener.ended(self)

    @property
    def tails(self) -> Collection[int]:
        """The keys of blocks behind which more of the prompt may come."""
        return self._open.keys()

    def hear(self, run: Run) -> bool:
        """A run of blocks, if it is of this prompt; whether more of it may follow."""
        if run.tail in self._seen or run.tail in self._open:
            return False
        before = self._open.get(run.chain.parent)
        if before is not None:
            seen = before.followed_by(run.stored)
        else:
            start = self._place(run.stored, run.chain.parent)
            if start is None:
                return False
            seen = run.at(start)
        items = read(self.references.outline, seen)
        if items is None:
            return False
        if before is not None:
            self._seen.pop(run.chain.parent, None)
        if max(len(self._seen), len(self._open) // _PIECES) >= _RUNS:
            self._crowded = True
            return False
        self._seen[run.tail] = seen
        last = items.get(self.references.outline.items - 1)
        if last is not None and last.tokens is not None:
            return False
        self._open[run.tail] = seen
        return True

    def _place(self, stored: Stored, parent: int) -> int | None:
        """The token of the prompt at which a run under `parent` begins."""
        if stored.parent is None:
            return None if stored.lora or stored.salt else 0
        return self.references.outline.after(parent, stored.block_size)

    def found(self) -> list[list[Item]]:
        """For each item of the prompt, all that the request's own blocks may say of it."""
        outline = self.references.outline
        found: list[list[Item]] = [[] for _ in self.references.names]
        for seen in self._seen.values():
            items = read(outline, seen.until(self.prompt_tokens), self.prompt_tokens)
            for k, item in (items or {}).items():
                # Where a block was cached, the events are another request's.
                if item.offset // seen.size * seen.size >= self.cached_tokens:
                    found[k].append(item)
        return [] if self._crowded else found


class Listener:
    """Hears one worker's events for the requests that run there."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._watches: list[Watch] = []
        # Who may go on behind the block of a key.
        self._open: dict[int, list[Watch]] = {}

    def watch(self, references: References) -> Watch | None:
        """A request goes to the worker now; None where too many are watched there already."""
        self._learner.settle()
        if len(self._watches) >= _WATCHES:
            return None
        watch = Watch(references, self)
        self._watches.append(watch)
        return watch

    def hear(self, stored: Stored, chain: Chain) -> None:
        """The worker stored a run of blocks."""
        if not self._watches:
            return
        self._learner.settle()
        # Most runs are of answers, and tell nothing of media.
        of_media = stored.extras is not None
        watches = self._watches if of_media else self._open.get(chain.parent)
        if watches:
            run = Run(stored, chain)
            for watch in tuple(watches):
                if watch.hear(run):
                    self._open.setdefault(run.tail, []).append(watch)

    def lose(self) -> None:
        """Events of the worker are missing, or it is gone: nothing is learned of what ran there."""
        self._watches.clear()
        self._open.clear()

    def ended(self, watch: Watch) -> None:
        """The worker has served the request."""
        if watch in self._watches:
            self._learner.ended(watch, self)

    def remove(self, watch: Watch) -> bool:
        """Whether the request was watched until now."""
        if watch not in self._watches:
            return False
        self._watches.remove(watch)
        for tail in watch.tails:
            others = self._open[tail]
            others.remove(watch)
            if not others:
                del self._open[tail]
        return True


class Learner:
    """What was learned of one model's media, by all of its workers.

    Pure but for the clock. What is due is done at the next call, whichever it
    is. `learned` counts names that were news, `ambiguous` items that several
    requests may have been about.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        limits: NameLimits | None = None,
        *,
        bridge: float = BRIDGE,
    ) -> None:
        self._clock = clock
        self._bridge = bridge
        self._names = Names(limits or NameLimits(), clock)
        self._ended: deque[tuple[float, Watch, Listener]] = deque()
        self.learned = 0
        self.ambiguous = 0

    def __len__(self) -> int:
        return len(self._names)

    def known(self, name: str) -> Learned | None:
        """What workers call the item that the router calls `name`, as far as it is known."""
        self.settle()
        return self._names.get(name)

    def ended(self, watch: Watch, listener: Listener) -> None:
        """A request ended; its last events may be on their way."""
        self._ended.append((self._clock() + self._bridge, watch, listener))

    def settle(self) -> None:
        """Decides what is to be learned of requests that ended long enough ago."""
        for _ in range(_AT_ONCE):
            if not self._ended or self._ended[0][0] > self._clock():
                return
            _, watch, listener = self._ended.popleft()
            if listener.remove(watch):
                self._decide(watch)

    def _decide(self, watch: Watch) -> None:
        references = watch.references
        media = references.outline.blocks.media
        for k, found in enumerate(watch.found()):
            name, identifiers = references.names[k], {item.identifier for item in found}
            if not identifiers:
                continue
            if media[k].identifier not in identifiers:
                # Whatever it is, it is not what it was.
                self._names.forget(name)
            lengths = {len(item.tokens) for item in found if item.tokens is not None}
            if len(identifiers) > 1 or len(lengths) > 1:
                self.ambiguous += 1
                continue
            (identifier,) = identifiers
            if identifier == name and references.certain[k]:
                self._names.forget(name)
                continue
            placeholders = next((item.tokens for item in found if item.tokens is not None), None)
            entry = learned(identifier, placeholders, self._names.limits)
            self.learned += self._names.keep(name, entry)
