"""What a worker calls media that only it has fetched, learned from its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from router.prefix.blocks import MediaSpan, PromptBlocks
from router.prefix.changes import Lost
from router.prefix.events import EventReader, Resync
from router.prefix.index import IndexSettings, PrefixIndex
from router.prefix.learn import BRIDGE, Learner, References, Watch
from router.prefix.names import NameLimits
from router.prefix.outline import Outline
from router.prefix.resident import Resident
from router.wire import common
from tests.prefix.batches import batch, picture

PAD, BREAK = 9000, 9001


@dataclass(frozen=True)
class Picture:
    """An item of a prompt: what the router and what the worker call it, and its true length.

    `guess` is the length that the router takes it to have. `row` placeholders
    stand between two breaks, 0 for a plain run.
    """

    name: str
    identifier: str
    length: int
    guess: int = 0
    certain: bool = False
    row: int = 0

    def tokens(self, length: int) -> list[int]:
        return [BREAK if self.row and i % self.row == self.row - 1 else PAD for i in range(length)]


Piece = Sequence[int] | Picture


def words(n: int, start: int = 1) -> list[int]:
    return list(range(start, start + n))


def laid_out(pieces: Sequence[Piece], *, truly: bool, seed: int = 1) -> PromptBlocks:
    """The prompt as the worker has it, or as the router takes it to be."""
    tokens: list[int] = []
    spans = []
    for piece in pieces:
        if isinstance(piece, Picture):
            length = piece.length if truly else piece.guess or piece.length
            name = piece.identifier if truly else piece.name
            spans.append(MediaSpan(name, len(tokens), length))
            tokens += piece.tokens(length)
        else:
            tokens += piece
    return PromptBlocks(np.array(tokens, np.uint32), spans, seed=seed)


@dataclass
class Served:
    """What a worker says of a request at its end."""

    prompt_tokens: int
    cached_tokens: int


@dataclass
class Engine:
    """A worker with a cache that never forgets; its events go to the router as it computes."""

    learner: Learner
    size: int = 4
    chunk: int = 1 << 20
    index: PrefixIndex = field(
        default_factory=lambda: PrefixIndex(
            IndexSettings(blocks=4096, expected_blocks=64), clock=lambda: 0.0, seed=1
        )
    )
    resyncs: int = 0

    def __post_init__(self) -> None:
        self.reader = EventReader()
        self.resident = Resident(self.index, 16, self.learner)
        self.resident.reporting = True
        self.cached: list[set[int]] = [set(), set()]
        self.numbers = [0, 0]

    def expects(self, *pieces: Piece) -> Watch:
        """The router sends a request; what it knows of its pictures is asked of the learner."""
        known = [p for p in pieces if isinstance(p, Picture)]
        learned = [self.learner.known(p.name) for p in known]
        seen = [
            p
            if entry is None
            else Picture(
                entry.identifier,
                entry.identifier,
                p.length if entry.placeholders is None else len(entry.placeholders),
                row=p.row,
            )
            for p, entry in zip(known, learned, strict=True)
        ]
        replaced = iter(seen)
        blocks = laid_out(
            [next(replaced) if isinstance(p, Picture) else p for p in pieces], truly=False
        )
        sure = [
            p.certain or (entry is not None and entry.runs > 0)
            for p, entry in zip(known, learned, strict=True)
        ]
        begins = [m.offset for m, one in zip(blocks.media, sure, strict=True) if not one]
        watch = self.resident.watch(
            References(
                Outline(blocks, min(begins, default=len(blocks.tokens))),
                tuple(p.name for p in known),
                tuple(p.certain for p in known),
            )
        )
        assert watch is not None
        return watch

    def computes(
        self, *pieces: Piece, output: int = 0, rank: int = 0, lora: str = "", tell: bool = True
    ) -> Served:
        """Serves a request, whoever sent it, with so many more tokens."""
        prompt = laid_out(pieces, truly=True)
        tokens = np.concatenate([prompt.tokens, np.arange(5000, 5000 + output, dtype=np.uint32)])
        whole = PromptBlocks(tokens, prompt.media, lora=lora, seed=1)
        keys = [int(k) for k in whole.keys(self.size)]
        hashes = [k >> 1 for k in keys]
        most = (len(prompt.tokens) - 1) // self.size
        cached = next(
            (i for i in range(most) if keys[i] not in self.cached[rank]), min(most, len(keys))
        )
        self.cached[rank].update(keys)
        for begin in range(cached, len(keys), self.chunk):
            blocks = [
                common.KvBlock(
                    block_hash=hashes[i],
                    token_ids=tokens[i * self.size : (i + 1) * self.size].tolist(),
                    block_size=self.size,
                    extra_keys=[
                        picture(m.identifier, m.offset - i * self.size)
                        for m in prompt.media
                        if m.offset < (i + 1) * self.size and m.offset + m.length > i * self.size
                    ],
                )
                for i in range(begin, min(begin + self.chunk, len(keys)))
            ]
            parent = hashes[begin - 1] if begin else None
            stored = common.KvBlocksStored(blocks=blocks, parent_block_hash=parent, lora_name=lora)
            self.numbers[rank] += 1
            if tell:
                event = common.KvCacheEvent(stored=stored)
                self.hear(batch(self.numbers[rank], event, rank=rank))
        return Served(len(prompt.tokens), cached * self.size)

    def hear(self, one: common.KvEventBatch) -> None:
        for action in self.reader.apply(one):
            if isinstance(action, Resync):
                self.resyncs += 1
            else:
                self.resident.apply(one.dp_rank, action)  # type: ignore[arg-type]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_bridge(self) -> None:
        self.now += BRIDGE


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def learner(clock: Clock) -> Learner:
    return Learner(clock)


@pytest.fixture
def engine(learner: Learner) -> Engine:
    return Engine(learner)


def serve(engine: Engine, clock: Clock, *pieces: Piece, output: int = 0) -> None:
    """One request by itself, from its start until it can be learned from."""
    watch = engine.expects(*pieces)
    watch.close(engine.computes(*pieces, output=output))
    clock.pass_bridge()
    engine.learner.settle()


def identifiers(learner: Learner, *names: str) -> list[str | None]:
    found = [learner.known(name) for name in names]
    return [one.identifier if one is not None else None for one in found]


def length(learner: Learner, name: str) -> int | None:
    entry = learner.known(name)
    placeholders = entry.placeholders if entry is not None else None
    return len(placeholders) if placeholders is not None else None


A, B = Picture("url-a", "id-a", 10), Picture("url-b", "id-b", 10)


# -- What is learned


@pytest.mark.parametrize("size", [2, 4, 7, 16])
@pytest.mark.parametrize("before", [0, 1, 4, 9, 40])
@pytest.mark.parametrize("after", [0, 1, 3, 12])
def test_a_pictures_name_and_length_are_learned_wherever_it_stands(
    learner: Learner, clock: Clock, size: int, before: int, after: int
) -> None:
    engine = Engine(learner, size)
    a = Picture("url-a", "id-a", 35, guess=50)
    pieces = (words(before), a, words(after, 200))
    serve(engine, clock, *pieces)
    assert identifiers(learner, "url-a") == ["id-a"]
    assert length(learner, "url-a") == 35
    assert (learner.learned, learner.ambiguous) == (1, 0)
    # From now on the router has the keys that the worker reports.
    engine.expects(*pieces)
    entry = learner.known("url-a")
    assert entry is not None
    assert entry.placeholders is not None
    known = Picture(entry.identifier, entry.identifier, len(entry.placeholders))
    keys = laid_out((words(before), known, words(after, 200)), truly=True).keys(size)
    (holder,) = engine.resident.holders
    assert engine.index.match(keys, [holder]).blocks[holder] == len(keys) > 0


def test_several_pictures_are_told_apart_by_their_order(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    c = Picture("url-c", "id-c", 3, guess=10)
    serve(engine, clock, words(3), A, B, words(5, 50), c, A, words(9, 80))
    assert identifiers(learner, "url-a", "url-b", "url-c") == ["id-a", "id-b", "id-c"]
    assert [length(learner, name) for name in ("url-a", "url-b", "url-c")] == [10, 10, 3]


def test_prompts_that_come_in_chunks_are_put_together(learner: Learner, clock: Clock) -> None:
    for chunk in (1, 2, 3):
        engine = Engine(learner, chunk=chunk)
        a = Picture(f"url-{chunk}", f"id-{chunk}", 23, guess=9)
        other = Picture(f"other-{chunk}", f"id-other-{chunk}", 14)
        serve(engine, clock, words(30), a, words(3, 90), other, words(7, 200), output=40)
        assert identifiers(learner, a.name, other.name) == [a.identifier, other.identifier]
        assert [length(learner, a.name), length(learner, other.name)] == [23, 14]


def test_what_stands_before_may_be_cached(engine: Engine, learner: Learner, clock: Clock) -> None:
    serve(engine, clock, words(40), A, words(9, 90))
    # The text, then the text and the first picture, which is known by now.
    serve(engine, clock, words(40), B, words(9, 90))
    c = Picture("url-c", "id-c", 6)
    serve(engine, clock, words(40), A, words(9, 90), c, words(9, 200))
    assert identifiers(learner, "url-a", "url-b", "url-c") == ["id-a", "id-b", "id-c"]


def test_a_mirror_has_the_name_of_what_it_mirrors(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    serve(engine, clock, words(9), A, words(9, 90))
    mirror = Picture("mirror", "id-a", 10)
    serve(engine, clock, words(7, 300), mirror, words(9, 90))
    assert identifiers(learner, "url-a", "mirror") == ["id-a", "id-a"]


def test_rows_with_breaks_come_back_as_they_were(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    rows = Picture("rows", "id-rows", 24, guess=12, row=6)
    serve(engine, clock, words(5), rows, words(9, 90))
    entry = learner.known("rows")
    assert entry is not None
    assert entry.placeholders is not None
    assert entry.placeholders.tolist() == rows.tokens(24)


def test_words_that_repeat_do_not_blur_where_a_picture_ends(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    serve(engine, clock, [7] * 6, A, [7] * 11, B, [7] * 30)
    assert (length(learner, "url-a"), length(learner, "url-b")) == (10, 10)


@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_of_the_worker_may_take_the_request(
    engine: Engine, learner: Learner, clock: Clock, rank: int
) -> None:
    watch = engine.expects(words(9), A, words(9, 90))
    watch.close(engine.computes(words(9), A, words(9, 90), rank=rank))
    clock.pass_bridge()
    assert identifiers(learner, "url-a") == ["id-a"]


def test_a_file_at_hand_that_the_worker_converts_has_another_name(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    plain = Picture("digest", "digest", 10, certain=True)
    converted = Picture("digest-rgba", "id-converted", 10, certain=True)
    serve(engine, clock, words(9), plain, words(9, 90), converted, words(9, 200))
    assert identifiers(learner, "digest", "digest-rgba") == [None, "id-converted"]
    assert len(learner) == 1, "what is known anyway takes no room"


# -- What is not: no name is better than a wrong one


def test_two_pictures_in_one_prompt_at_once_teach_nothing(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    prompts = [(words(9), one, words(9, 90)) for one in (A, B)]
    watches = [engine.expects(*prompt) for prompt in prompts]
    served = [engine.computes(*prompt) for prompt in prompts]
    for watch, counts in zip(watches, served, strict=True):
        watch.close(counts)
    clock.pass_bridge()
    assert identifiers(learner, "url-a", "url-b") == [None, None]
    assert (learner.learned, learner.ambiguous) == (0, 2)


def test_the_same_picture_twice_at_once_is_no_riddle(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    prompt = (words(9), A, words(9, 90))
    watches = [engine.expects(*prompt) for _ in range(2)]
    for watch in watches:
        watch.close(engine.computes(*prompt))
    clock.pass_bridge()
    assert identifiers(learner, "url-a") == ["id-a"]
    assert learner.ambiguous == 0


def test_pictures_of_other_lengths_are_told_apart(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    longer = Picture("longer", "id-longer", 30, guess=10)
    prompts = [(words(9), one, words(9, 90)) for one in (A, longer)]
    watches = [engine.expects(*prompt) for prompt in prompts]
    for watch, prompt in zip(watches, prompts, strict=True):
        watch.close(engine.computes(*prompt))
    clock.pass_bridge()
    assert identifiers(learner, "url-a", "longer") == ["id-a", "id-longer"]


def test_the_same_pictures_in_another_order_at_once_teach_nothing(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    prompts = [(words(9), one, words(5, 50), two, words(9, 90)) for one, two in ((A, B), (B, A))]
    watches = [engine.expects(*prompt) for prompt in prompts]
    for watch, prompt in zip(watches, prompts, strict=True):
        watch.close(engine.computes(*prompt))
    clock.pass_bridge()
    assert identifiers(learner, "url-a", "url-b") == [None, None]


def test_requests_that_differ_behind_their_pictures_may_run_at_once(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    prompts = [(words(9), one, words(9, 90 + n)) for n, one in enumerate((A, B))]
    watches = [engine.expects(*prompt) for prompt in prompts]
    served = [engine.computes(*prompt) for prompt in reversed(prompts)]
    for watch, counts in zip(watches, reversed(served), strict=True):
        watch.close(counts)
    clock.pass_bridge()
    assert identifiers(learner, "url-a", "url-b") == ["id-a", "id-b"]


def test_another_routers_request_with_the_same_words_teaches_nothing(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    # Theirs is heard of first, while ours is being fetched.
    watch = engine.expects(words(9), A, words(9, 90))
    engine.computes(words(9), B, words(9, 90))
    served = engine.computes(words(9), A, words(9, 90))
    watch.close(served)
    clock.pass_bridge()
    assert identifiers(learner, "url-a") == [None]
    assert learner.ambiguous == 1


def test_blocks_that_were_cached_for_us_are_not_taken_from_others(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    engine.computes(words(9), A, words(9, 90))
    watch = engine.expects(words(9), A, words(9, 90))
    # Ours finds all of its own in the cache, so the only events are theirs.
    engine.computes(words(9), B, words(9, 90))
    watch.close(engine.computes(words(9), A, words(9, 90)))
    clock.pass_bridge()
    assert identifiers(learner, "url-a") == [None]


def test_blocks_that_only_an_answer_filled_tell_nothing(learner: Learner, clock: Clock) -> None:
    engine = Engine(learner, size=64)
    # Theirs is longer by its answer; ours never fills the block, and says nothing.
    watch = engine.expects(words(9), A, words(9, 90))
    engine.computes(words(9), B, words(9, 90), output=64)
    watch.close(engine.computes(words(9), A, words(9, 90)))
    clock.pass_bridge()
    assert identifiers(learner, "url-a") == [None]


@pytest.mark.parametrize(
    "other",
    [
        (words(8), B, words(9, 90)),
        ([*words(8), 77], B, words(9, 90)),
        (words(10), B, words(9, 90)),
        (words(9), words(30, 90)),
        (words(9), B, B, words(9, 90)),
        (words(9), B, words(9, 91)),
        (words(9), Picture("", "id-x", 9), words(9, 90)),
    ],
)
def test_events_of_other_prompts_are_left_alone(
    engine: Engine, learner: Learner, clock: Clock, other: tuple[Piece, ...]
) -> None:
    watch = engine.expects(words(9), A, words(9, 90))
    engine.computes(*other)
    watch.close(Served(28, 0))
    clock.pass_bridge()
    assert identifiers(learner, "url-a") == [None]
    assert (learner.learned, learner.ambiguous) == (0, 0)


def test_an_adapters_blocks_are_not_a_plain_requests(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    watch = engine.expects(words(9), A, words(9, 90))
    engine.computes(words(9), B, words(9, 90), lora="adapter")
    watch.close(engine.computes(words(9), A, words(9, 90)))
    clock.pass_bridge()
    assert identifiers(learner, "url-a") == ["id-a"]


def test_nothing_is_learned_of_a_request_that_failed(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    watch = engine.expects(words(9), A, words(9, 90))
    engine.computes(words(9), A, words(9, 90))
    watch.close(None)
    clock.pass_bridge()
    assert identifiers(learner, "url-a") == [None]


def test_nothing_is_learned_where_events_are_missing(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    def lost() -> None:
        engine.resident.apply(0, Lost())

    for end in (lost, engine.resident.fall_silent, engine.resident.leave):
        engine.resident.reporting = True
        watch = engine.expects(words(9), A, words(9, 90))
        served = engine.computes(words(9), A, words(9, 90))
        end()
        watch.close(served)
        clock.pass_bridge()
        assert identifiers(learner, "url-a") == [None]


def test_a_worker_that_does_not_report_is_not_watched(engine: Engine) -> None:
    engine.resident.fall_silent()
    references = References(Outline(laid_out((words(9), A), truly=False), 9), ("url-a",), (False,))
    assert engine.resident.watch(references) is None


# -- When


def test_late_events_count_until_a_moment_after_the_end(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    prompt = (words(9), A, words(9, 90))
    watch = engine.expects(*prompt)
    watch.close(Served(28, 0))
    clock.now += BRIDGE / 2
    engine.computes(*prompt)
    assert identifiers(learner, "url-a") == [None], "another's may still come"
    clock.pass_bridge()
    assert identifiers(learner, "url-a") == ["id-a"]
    late = engine.expects(words(9, 700), B)
    late.close(Served(19, 0))
    clock.pass_bridge()
    engine.computes(words(9, 700), B)
    clock.pass_bridge()
    assert identifiers(learner, "url-b") == [None]


def test_what_is_behind_a_url_may_change(engine: Engine, learner: Learner, clock: Clock) -> None:
    serve(engine, clock, words(9), A, words(9, 90))
    changed = Picture("url-a", "id-new", 17)
    serve(engine, clock, words(9), changed, words(9, 90))
    assert (identifiers(learner, "url-a"), length(learner, "url-a")) == (["id-new"], 17)
    assert learner.learned == 2


def test_a_name_that_proved_wrong_is_forgotten_even_if_the_right_one_is_not_clear(
    engine: Engine, learner: Learner, clock: Clock
) -> None:
    serve(engine, clock, words(9), A, words(9, 90))
    changed, prompt = Picture("url-a", "id-new", 10), (words(9), words(9, 90))
    watches = [engine.expects(prompt[0], one, prompt[1]) for one in (changed, B)]
    for watch, one in zip(watches, (changed, B), strict=True):
        watch.close(engine.computes(prompt[0], one, prompt[1]))
    clock.pass_bridge()
    assert identifiers(learner, "url-a", "url-b") == [None, None]


def test_a_name_counts_for_a_time_after_it_was_last_seen(clock: Clock) -> None:
    limits = NameLimits(lifetime=60)
    learner = Learner(clock, limits)
    engine = Engine(learner)
    serve(engine, clock, words(9), A, words(9, 90))
    clock.now += 50
    serve(engine, clock, words(9, 300), A, words(9, 90))
    clock.now += 50
    assert identifiers(learner, "url-a") == ["id-a"], "it was seen again"
    assert learner.learned == 1
    clock.now += 10
    assert identifiers(learner, "url-a") == [None]
    assert len(learner) == 0


# -- Bounds


def test_the_least_recently_used_names_go(clock: Clock) -> None:
    learner = Learner(clock, NameLimits(entries=3))
    engine = Engine(learner)
    for n in range(4):
        serve(engine, clock, words(9, 100 * n), Picture(f"url-{n}", f"id-{n}", 10), words(9, 50))
        learner.known("url-0")
    assert identifiers(learner, *(f"url-{n}" for n in range(4))) == ["id-0", None, "id-2", "id-3"]


def test_layouts_take_a_bounded_room(clock: Clock) -> None:
    learner = Learner(clock, NameLimits(runs=20, runs_each=8))
    engine = Engine(learner)
    for n, rows in enumerate((3, 4, 4)):
        item = Picture(f"url-{n}", f"id-{n}", rows * 6, row=6)
        serve(engine, clock, words(9, 100 * n), item, words(9, 50))
    # 6, 8 and 8 runs are more than 20.
    assert [length(learner, f"url-{n}") for n in range(3)] == [None, 24, 24]
    serve(engine, clock, words(9, 700), Picture("many", "id-many", 60, row=6), words(9, 50))
    assert (identifiers(learner, "many"), length(learner, "many")) == (["id-many"], None)


def test_no_more_requests_are_watched_than_have_room(engine: Engine) -> None:
    references = References(Outline(laid_out((words(9), A), truly=False), 9), ("url-a",), (False,))
    watches = [engine.resident.watch(references) for _ in range(100)]
    taken = [watch for watch in watches if watch is not None]
    assert len(taken) == 64
    taken[0].close(None)
    assert engine.resident.watch(references) is not None
