"""What a reader found on a board."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.tier.board.layout import LENGTH_BITS, LENGTH_MASK, Flag
from kvpool.tier.board.order import ORDERED

Slots = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_OFFSET, _LENGTH = 1, 2
_MASK = np.array(LENGTH_MASK, np.uint64)
_SHIFT = np.array(LENGTH_BITS, np.uint64)
UNORDERED = 0 if ORDERED else int(Flag.UNVERIFIED)
"""Flags that every block has on this machine."""


class Place(NamedTuple):
    """Where one block lies: offset in the arena's data region, length in bytes, `Flag`s."""

    slot: int
    generation: int
    offset: int
    length: int
    flags: int


class Found:
    """Where `n` blocks lie; values of one that is not `present` mean nothing. Nothing in it changes.

    `slots`: int64 `[n]`. `generations`: uint64 `[n]`. `present`: bool `[n]`.
    """

    __slots__ = ("_heads", "at", "generations", "present", "slots")

    def __init__(self, slots: Slots, at: Slots, generations: Words, heads: Words, present: npt.NDArray[np.bool_]) -> None:
        """`at`: the slots' first words; `heads`: uint64 `[n, 4]`, the first halves of their records."""
        self.slots, self.at, self.generations, self._heads, self.present = slots, at, generations, heads, present

    def __len__(self) -> int:
        return self.slots.size

    @property
    def offsets(self) -> Words:
        """In the arena's data region, bytes, uint64 `[n]`."""
        return self._heads[:, _OFFSET]

    @property
    def lengths(self) -> Words:
        """Bytes, uint64 `[n]`."""
        return self._heads[:, _LENGTH] & _MASK

    @property
    def flags(self) -> Words:
        """`Flag`s, uint64 `[n]`."""
        flags = self._heads[:, _LENGTH] >> _SHIFT
        return flags | np.uint64(UNORDERED) if UNORDERED else flags

    def put(self, index: int, place: Place) -> None:
        """The reader's last word on one of them, before it hands this out."""
        self.slots[index], self.at[index] = place.slot, place.slot << 3
        self.generations[index], self.present[index] = place.generation, True
        self._heads[index, _OFFSET], self._heads[index, _LENGTH] = place.offset, place.length | place.flags << LENGTH_BITS

    def leading(self) -> int:
        """How many are present before the first that isn't."""
        first = self.present.tobytes().find(b"\0")
        return self.slots.size if first < 0 else first
