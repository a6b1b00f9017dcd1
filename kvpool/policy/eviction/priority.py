"""Lowest priority first, among equals the least recently used.

The retention of TensorRT-LLM (`KvCacheRetentionConfig`): each range of a prompt's tokens is written with a priority, 0 to 100, and
optionally for how long; when that time is over the block falls back to the default priority, keeping its place by last use
there. A use never changes a priority. Priorities are the caller's word: a head that is given less than its tail leaves before
it and makes it useless, so give prefixes at least what their continuations have.
"""

from collections.abc import Generator
from itertools import count

from kvpool.block import BlockKey
from kvpool.policy.eviction.contract import DEFAULT_PRIORITY, NEVER_NS, Arrival, inserted_twice
from kvpool.policy.eviction.walk import Ranked


class Priority:
    """Lowest effective priority first, then least recently used. O(log n)."""

    __slots__ = ("_limited", "_now_ns", "_order", "_ticks")

    def __init__(self) -> None:
        self._order = Ranked()  # by (priority, last use)
        self._limited = Ranked()  # by (end of the priority, arrival); only blocks whose priority ends
        self._ticks = count()
        self._now_ns = 0

    def inserted(self, arrival: Arrival, now_ns: int) -> None:
        """See `EvictionPolicy.inserted`."""
        key, tick = arrival.key, next(self._ticks)
        if key in self._order:
            raise inserted_twice(key)
        self._advance(now_ns)
        if arrival.priority_until_ns <= self._now_ns:
            self._order.set(key, (DEFAULT_PRIORITY, tick))
            return
        self._order.set(key, (arrival.priority, tick))
        if arrival.priority_until_ns < NEVER_NS:
            self._limited.set(key, (arrival.priority_until_ns, tick))

    def touched(self, key: BlockKey, now_ns: int, sequence: int = 0) -> None:
        """See `EvictionPolicy.touched`."""
        self._advance(now_ns)
        rank = self._order.get(key)
        if rank is not None:
            self._order.set(key, (rank[0], next(self._ticks)))

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy.removed`."""
        self._order.drop(key)
        self._limited.drop(key)

    def victims(self) -> Generator[BlockKey, None, None]:
        """See `EvictionPolicy.victims`."""
        return self._order.in_order()

    def _advance(self, now_ns: int) -> None:
        """Let priorities fall back whose time is over."""
        self._now_ns = max(self._now_ns, now_ns)
        while (first := self._limited.first()) is not None and first[0][0] <= self._now_ns:
            key = first[1]
            self._limited.drop(key)
            rank = self._order.get(key)
            if rank is not None:
                self._order.set(key, (DEFAULT_PRIORITY, rank[1]))

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)
