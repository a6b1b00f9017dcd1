"""Least frequently used first, among equals the least recently used.

The constant-time scheme of Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme", 2010: one
queue per count, and a use moves a block from the queue of n to the end of that of n + 1. The counts in use are a sorted list: few,
since k different counts take some k²/2 uses. Counts live only as long as the block is here and don't age, as in the
textbook; so what was hot once stays long, which is why LFU does worse than LRU on conversations.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Generator

from kvpool.block import BlockKey
from kvpool.policy.eviction.contract import Arrival, inserted_twice
from kvpool.policy.eviction.walk import in_order


class Lfu:
    """Least frequently used first. O(log c) for c different counts."""

    __slots__ = ("_counts", "_queues", "_uses")

    def __init__(self) -> None:
        self._uses: dict[BlockKey, int] = {}
        self._queues: dict[int, OrderedDict[BlockKey, None]] = {}  # by number of uses; none is empty
        self._counts: list[int] = []  # the keys of _queues, sorted

    def inserted(self, arrival: Arrival, now_ns: int) -> None:
        """See `EvictionPolicy.inserted`."""
        key = arrival[0]
        if key in self._uses:
            raise inserted_twice(key)
        self._enqueue(key, 1)

    def touched(self, key: BlockKey, now_ns: int, sequence: int = 0) -> None:
        """See `EvictionPolicy.touched`."""
        uses = self._uses.get(key)
        if uses is not None:
            self._dequeue(key, uses)
            self._enqueue(key, uses + 1)

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy.removed`."""
        uses = self._uses.pop(key, None)
        if uses is not None:
            self._dequeue(key, uses)

    def victims(self) -> Generator[BlockKey, None, None]:
        """See `EvictionPolicy.victims`."""
        for count in self._counts.copy():
            yield from in_order(self._queues[count])

    def _enqueue(self, key: BlockKey, uses: int) -> None:
        self._uses[key] = uses
        queue = self._queues.get(uses)
        if queue is None:
            queue = self._queues[uses] = OrderedDict()
            self._counts.insert(bisect_left(self._counts, uses), uses)
        queue[key] = None

    def _dequeue(self, key: BlockKey, uses: int) -> None:
        queue = self._queues[uses]
        del queue[key]
        if not queue:
            del self._queues[uses]
            del self._counts[bisect_left(self._counts, uses)]

    def __contains__(self, key: object) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)
