"""A forwarded prompt as the worker will have it, as far as that can be known.

The worker fetches its media by itself. What is known of them comes from a
glance, and from what events told of earlier requests with the same references.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.media.intake import Glance
from router.prefix.blocks import MediaSpan, PromptBlocks
from router.prefix.learn import References
from router.prefix.names import Learned
from router.prefix.outline import Outline
from router.request.estimate import Estimate
from router.request.prepared import ItemSize
from router.vision.plan import ModelSpec


@dataclass(frozen=True)
class Item:
    """One forwarded item: what was seen of it, what it is taken for, what was learned of it."""

    seen: Glance
    estimate: Estimate
    learned: Learned | None

    @property
    def identifier(self) -> str:
        """What the worker calls it, if that is known."""
        return self.learned.identifier if self.learned is not None else self.seen.name

    @property
    def certain(self) -> bool:
        """Whether its name and length can be no others by what was seen of it."""
        return self.seen.named_by_content and self.estimate.certain

    @property
    def sure(self) -> bool:
        """Whether its identifier and length are those that the worker reports."""
        return self.certain or (self.learned is not None and self.learned.runs > 0)


@dataclass(frozen=True)
class Referred:
    """A prompt of `tokens` tokens; `blocks` and `references` where prefixes are scored."""

    tokens: int
    items: tuple[ItemSize, ...]
    blocks: PromptBlocks | None = None
    references: References | None = None


def expand(
    spec: ModelSpec, ids: Sequence[int], items: Sequence[Item], *, prefixes: bool
) -> Referred:
    """The prompt with its items at the lengths that they should have.

    Raises `Fault` ANCHOR_MISMATCH.
    """
    placeholders = {
        place: item.learned.placeholders
        for place, item in enumerate(items)
        if item.learned is not None
    }
    known = {place: tokens for place, tokens in placeholders.items() if tokens is not None}
    expanded = spec.expand(ids, [item.estimate.plan for item in items], known)
    sizes = []
    for place, item in enumerate(items):
        plan, size_known = item.estimate.plan, item.estimate.known
        tokens = plan.feature_tokens
        if place in known:
            tokens = int((known[place] == spec.placeholder_ids[plan.modality]).sum())
        width, height = plan.source_width, plan.source_height
        sizes.append(ItemSize(width if size_known else 0, height if size_known else 0, tokens))
    if not prefixes:
        return Referred(len(expanded.ids), tuple(sizes))
    begins = [
        offset for (offset, _), item in zip(expanded.ranges, items, strict=True) if not item.sure
    ]
    blocks = PromptBlocks(
        expanded.ids,
        [
            MediaSpan(item.identifier, *place)
            for item, place in zip(items, expanded.ranges, strict=True)
        ],
        exact=not begins,
    )
    references = References(
        Outline(blocks, min(begins, default=len(expanded.ids))),
        tuple(item.seen.name for item in items),
        tuple(item.certain for item in items),
    )
    return Referred(len(expanded.ids), tuple(sizes), blocks, references)
