"""Sets of (holder, tier) as one integer: a byte for each holder, a bit in it for each tier.

Holder number `slot` has the byte `slot`; in it bit 0 is DRAM, bit 1 the GPU, bit 2 what is below. Thus a block's state is one integer,
two states are joined or compared by one operation whatever the number of holders, and `int.to_bytes` spells a state as one byte a holder.
"""

from collections.abc import Iterator
from typing import Final

from kvpool.request.events import BELOW, BESIDE, DRAM

TIERS: Final = (DRAM, BESIDE, BELOW)
ANY: Final = 7
"""A holder's byte when it holds the block on every tier."""


def lane(slot: int, bits: int = ANY) -> int:
    """`bits` in the byte of holder number `slot`."""
    return bits << 8 * slot


def bit_of(tier: int) -> int:
    """The bit of `tier` in a holder's byte."""
    if tier not in TIERS:
        raise ValueError(f"a tier is one of {TIERS}, not {tier}")
    return 1 << tier - 1


def ones(slots: int) -> int:
    """1 in the bytes of the first `slots` holders."""
    return int.from_bytes(b"\1" * slots, "little")


def holders_of(state: int, unit: int) -> int:
    """1 in the byte of each holder that has any bit in `state`; `unit` is `ones` of at least as many holders."""
    return (state | state >> 1 | state >> 2) & unit


def slots_of(marks: int) -> Iterator[int]:
    """The numbers of the holders marked (with a 1 in their byte) in `marks`, in order."""
    while marks:
        low = marks & -marks
        yield low.bit_length() - 1 >> 3
        marks ^= low
