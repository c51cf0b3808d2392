"""Real files, damaged in the ways that files get damaged, and in the ways that attackers do it."""

from __future__ import annotations

import random


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One damaged copy."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not changed:
            break
        at = rng.randrange(len(changed))
        match rng.randrange(8):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF))
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + rng.randrange(1, 64)]
            case 4:
                changed[at:at] = changed[at : at + rng.randrange(1, 64)]
            case 5:
                changed[at : at + 4] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\1"))
            case 6:
                # Headers are where the sizes are.
                head = rng.randrange(min(len(changed), 64))
                changed[head] = rng.randrange(256)
            case _:
                changed[at : at + 8] = rng.randbytes(8)
    return bytes(changed)
