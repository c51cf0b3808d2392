"""One walk along a prompt's keys, for all holders at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from router.prefix import table


@dataclass(frozen=True)
class Match:
    """How much of a prompt each holder has, by holder number.

    `blocks` (int32 [holders]) is the length of the unbroken prefix; `weights`
    (float64 [holders]) is the same with each block weighted by its tier.
    """

    blocks: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float64]


# A de Bruijn sequence: multiplied by 1 << n, its top six bits differ for each n.
_SEQUENCE = 0x03F79D71B4CB0A89
_NUMBERS = np.zeros(64, np.int64)
for _n in range(64):
    _NUMBERS[((_SEQUENCE << _n) & (2**64 - 1)) >> 58] = _n


@njit(inline="always")
def _number(bit: Any) -> Any:
    """n of a word with only bit n set."""
    return _NUMBERS[(bit * np.uint64(_SEQUENCE)) >> np.uint64(58)]


@njit(nogil=True, cache=True)
def walk(
    t: Any,
    bits: Any,
    expected: Any,
    keys: Any,
    now: int,
    tier_losses: Any,
    active: Any,
    blocks: Any,
    losses: Any,
) -> None:
    """Follows the keys for as long as one of the holders in `active` has each block.

    `bits` is [slots, tiers, words], `active` uint64 [words] and used up.
    `blocks` (int32 [holders]) gets the lengths, `losses` (float64 [holders])
    the sum of what the blocks outside the device are worth less.
    """
    words = len(active)
    for i in range(len(keys)):
        slot = table.find(t, keys[i])
        guess = np.int64(-2)
        alive = False
        for w in range(words):
            asked = active[w]
            if asked == np.uint64(0):
                continue
            device = host = disk = np.uint64(0)
            if slot >= 0:
                device, host, disk = bits[slot, 0, w], bits[slot, 1, w], bits[slot, 2, w]
            have = (device | host | disk) & asked
            predicted = np.uint64(0)
            if have != asked:
                if guess == -2:
                    guess = table.find(expected.slots, keys[i])
                rest = asked & ~have
                while rest:
                    bit = rest & (~rest + np.uint64(1))
                    holder = w * 64 + _number(bit)
                    if guess >= 0 and expected.expiry[guess, holder] > now:
                        predicted |= bit
                    else:
                        blocks[holder] = i
                    rest ^= bit
                have |= predicted
                active[w] = have
            beneath = have & ~device & ~predicted
            while beneath:
                bit = beneath & (~beneath + np.uint64(1))
                losses[w * 64 + _number(bit)] += tier_losses[1 if host & bit else 2]
                beneath ^= bit
            alive = alive or have != np.uint64(0)
        if not alive:
            break
    for w in range(words):
        for b in range(64):
            if active[w] & (np.uint64(1) << np.uint64(b)):
                blocks[w * 64 + b] = len(keys)


@njit(nogil=True, cache=True)
def touch_chain(t: Any, keys: Any, epoch: Any) -> None:
    """Marks a chain as used, from leaf to root: a parent is as recent as its children."""
    depth = 0
    while depth < len(keys) and table.find(t, keys[depth]) >= 0:
        depth += 1
    for i in range(depth - 1, -1, -1):
        table.touch(t, table.find(t, keys[i]), epoch)
