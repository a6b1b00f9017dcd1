"""Sets of holders, one for each tier: who holds a block where.

A set of holders is an integer with the bit of each holder's number. A state is three of them, for DRAM, GPU and what is below; so states
are joined and compared by a few operations on integers, whatever the number of holders.
"""

from collections.abc import Iterator
from typing import Final

from kvpool.request.events import BELOW, BESIDE, DRAM

State = tuple[int, int, int]
"""The holders of a block in DRAM, in the GPU, below."""

TIERS: Final = (DRAM, BESIDE, BELOW)
NOBODY: Final[State] = (0, 0, 0)


def on(tier: int, holders: int) -> State:
    """`holders` on `tier`. Raises `ValueError` for an unknown tier."""
    if tier == DRAM:
        return holders, 0, 0
    if tier == BESIDE:
        return 0, holders, 0
    if tier == BELOW:
        return 0, 0, holders
    raise ValueError(f"a tier is one of {TIERS}, not {tier}")


def slots_of(holders: int) -> Iterator[int]:
    """The numbers of `holders`, in order."""
    while holders:
        low = holders & -holders
        yield low.bit_length() - 1
        holders ^= low
