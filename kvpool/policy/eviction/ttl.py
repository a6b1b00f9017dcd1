"""Soonest to expire first; blocks that don't expire leave last, the least recently used of them first.

For stores whose writers know how long a block is worth keeping (a session's length, a scheduled batch): what would be gone
soon anyway makes room first (Redis calls it `volatile-ttl`). A use changes nothing between different deadlines.
"""

from collections.abc import Generator
from itertools import count

from kvpool.block import BlockKey
from kvpool.policy.eviction.contract import Arrival, inserted_twice
from kvpool.policy.eviction.walk import Ranked


class Ttl:
    """Soonest to expire first, then least recently used. O(log n)."""

    __slots__ = ("_order", "_ticks")

    def __init__(self) -> None:
        self._order = Ranked()  # by (expiry, last use)
        self._ticks = count()

    def inserted(self, arrival: Arrival, now_ns: int) -> None:
        """See `EvictionPolicy.inserted`."""
        if arrival.key in self._order:
            raise inserted_twice(arrival.key)
        self._order.set(arrival.key, (arrival.expires_ns, next(self._ticks)))

    def touched(self, key: BlockKey, now_ns: int, sequence: int = 0) -> None:
        """See `EvictionPolicy.touched`."""
        rank = self._order.get(key)
        if rank is not None:
            self._order.set(key, (rank[0], next(self._ticks)))

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
