"""Least recently used first: one queue, a use moves a block to its young end.

The oldest trick, here as the yardstick and for stores without chains. It knows nothing of parents: since uses and arrivals of
one batch come tails first, the heads of a chain are the younger ones and mostly stay longer, but nothing guarantees it;
`prefix-lru` does.
"""

from collections import OrderedDict
from collections.abc import Generator

from kvpool.block import BlockKey
from kvpool.policy.eviction.contract import Arrival, inserted_twice
from kvpool.policy.eviction.walk import in_order


class Lru:
    """Least recently used first. Every operation is O(1)."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: OrderedDict[BlockKey, None] = OrderedDict()  # oldest use first

    def inserted(self, arrival: Arrival, now_ns: int) -> None:
        """See `EvictionPolicy.inserted`."""
        key = arrival[0]
        if key in self._queue:
            raise inserted_twice(key)
        self._queue[key] = None

    def touched(self, key: BlockKey, now_ns: int, sequence: int = 0) -> None:
        """See `EvictionPolicy.touched`."""
        if key in self._queue:
            self._queue.move_to_end(key)

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy.removed`."""
        self._queue.pop(key, None)

    def victims(self) -> Generator[BlockKey, None, None]:
        """See `EvictionPolicy.victims`."""
        return in_order(self._queue)

    def __contains__(self, key: object) -> bool:
        return key in self._queue

    def __len__(self) -> int:
        return len(self._queue)
