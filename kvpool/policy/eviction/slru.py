"""Segmented LRU: blocks used once on trial, blocks used again protected.

Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance", IEEE Computer 27(3), 1994. A block arrives in
the *trial* segment; a use there moves it to the young end of the *protected* segment, which holds at most 80 % of the bytes: what
it has too much falls back, oldest first, to the young end of the trial segment. Trial blocks leave before protected ones, oldest
first in both. One pass over things used once can't push out what is used over and over.
"""

from collections import OrderedDict
from collections.abc import Generator
from fractions import Fraction
from typing import Final

from kvpool.block import BlockKey
from kvpool.policy.eviction.contract import Arrival, inserted_twice
from kvpool.policy.eviction.walk import in_order

PROTECTED_SHARE: Final = Fraction(4, 5)


class Slru:
    """Trial before protected, least recently used first. Every operation is O(1) amortised."""

    __slots__ = ("_bytes", "_protected", "_protected_bytes", "_trial")

    def __init__(self) -> None:
        self._trial: OrderedDict[BlockKey, int] = OrderedDict()  # bytes; oldest first
        self._protected: OrderedDict[BlockKey, int] = OrderedDict()
        self._bytes = 0
        self._protected_bytes = 0

    def inserted(self, arrival: Arrival, now_ns: int) -> None:
        """See `EvictionPolicy.inserted`."""
        key, length = arrival[0], arrival[3]
        if key in self:
            raise inserted_twice(key)
        self._trial[key] = length
        self._bytes += length

    def touched(self, key: BlockKey, now_ns: int, sequence: int = 0) -> None:
        """See `EvictionPolicy.touched`."""
        if key in self._protected:
            self._protected.move_to_end(key)
            return
        length = self._trial.pop(key, None)
        if length is None:
            return
        self._protected[key] = length
        self._protected_bytes += length
        while self._protected_bytes * PROTECTED_SHARE.denominator > self._bytes * PROTECTED_SHARE.numerator:
            oldest, length = self._protected.popitem(last=False)
            self._protected_bytes -= length
            self._trial[oldest] = length

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy.removed`."""
        length = self._trial.pop(key, None)
        if length is None:
            length = self._protected.pop(key, None)
            if length is None:
                return
            self._protected_bytes -= length
        self._bytes -= length

    def victims(self) -> Generator[BlockKey, None, None]:
        """See `EvictionPolicy.victims`."""
        yield from in_order(self._trial)
        yield from in_order(self._protected)

    def __contains__(self, key: object) -> bool:
        return key in self._trial or key in self._protected

    def __len__(self) -> int:
        return len(self._trial) + len(self._protected)
