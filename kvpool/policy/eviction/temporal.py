"""Oldest tokens first: what a fast tier keeps is the recent end of every sequence.

TTKV keeps the newest tokens of a sequence in fast memory, first in, first out, and streams the older ones, which attention reads
less and at lower precision, from the slow tier. Here that is an order over blocks: by when their tokens were made, the
oldest first. Blocks of one arrival time were made in order of depth, so the head leaves before its tail. A use changes
nothing: age is the age of the tokens.

This is for a fast tier above a slower one that still has the blocks, and for readers that can use a block without having its
head beside it. As the only tier of a prefix cache it is the wrong choice: it gives up heads first, and a tail without its head
is no hit.
"""

from collections.abc import Generator
from itertools import count

from kvpool.block import BlockKey
from kvpool.policy.eviction.contract import Arrival, inserted_twice
from kvpool.policy.eviction.walk import Ranked


class Temporal:
    """First arrived first, within one arrival time the shallowest first. O(log n)."""

    __slots__ = ("_order", "_ticks")

    def __init__(self) -> None:
        self._order = Ranked()  # by (arrival, depth, count)
        self._ticks = count()

    def inserted(self, arrival: Arrival, now_ns: int) -> None:
        """See `EvictionPolicy.inserted`."""
        if arrival.key in self._order:
            raise inserted_twice(arrival.key)
        self._order.set(arrival.key, (now_ns, arrival.depth, next(self._ticks)))

    def touched(self, key: BlockKey, now_ns: int, sequence: int = 0) -> None:
        """See `EvictionPolicy.touched`. Ignored: being read makes no token younger."""

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy.removed`."""
        self._order.drop(key)

    def victims(self) -> Generator[BlockKey, None, None]:
        """See `EvictionPolicy.victims`."""
        return self._order.in_order()

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)
