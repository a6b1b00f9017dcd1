"""The two shapes most policies are made of, and how to walk them while the caller takes blocks out.

*A queue*: an ordered dict, the next to leave first. `in_order` walks it by snapshots of growing size, so a key may go while
it is yielded, and those passed over keep their place because nothing was moved. The dict must be an `OrderedDict`: a plain
one that loses its first key over and over has to skip the holes.

*A ranking*: `Ranked` keeps keys by a rank that may change, lowest first: a heap whose outdated entries are recognised when they
surface (so a key must not get back a rank that it had before another one). It is rebuilt when more than half of it is
outdated, so it stays within twice the live keys (plus a little), and every operation is O(log n) amortised. Ranks must be
distinct (end them with a counter), so that keys never get compared.
"""

from collections import OrderedDict
from collections.abc import Generator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

from kvpool.block import BlockKey

FIRST_STEP = 16
_SLACK = 64

Rank = tuple[int, ...]


def in_order(queue: "OrderedDict[BlockKey, Any]") -> Generator[BlockKey, None, None]:
    """The keys from the first on. Between two steps the key just yielded may be removed, and nothing else changes."""
    passed, step = 0, FIRST_STEP
    while passed < len(queue):
        for key in list(islice(queue, passed, passed + step)):
            yield key
            passed += key in queue
        step *= 2


class Ranked:
    """Keys in order of their rank, lowest first."""

    __slots__ = ("_heap", "_ranks")

    def __init__(self) -> None:
        self._ranks: dict[BlockKey, Rank] = {}
        self._heap: list[tuple[Rank, BlockKey]] = []

    def set(self, key: BlockKey, rank: Rank) -> None:
        """Give `key` a rank, or another one that neither it had before nor any other key has."""
        if self._ranks.get(key) == rank:
            return
        self._ranks[key] = rank
        heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._ranks) + _SLACK:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapify(self._heap)

    def get(self, key: BlockKey) -> Rank | None:
        """The rank of `key`, None without one."""
        return self._ranks.get(key)

    def drop(self, key: BlockKey) -> None:
        """Forget `key`; unknown keys are ignored."""
        self._ranks.pop(key, None)

    def first(self) -> tuple[Rank, BlockKey] | None:
        """The key of the lowest rank, None when there is none."""
        heap, ranks = self._heap, self._ranks
        while heap:
            rank, key = heap[0]
            if ranks.get(key) == rank:
                return heap[0]
            heappop(heap)
        return None

    def in_order(self) -> Generator[BlockKey, None, None]:
        """The keys from the lowest rank on. Between two steps the key just yielded may be dropped, and nothing else changes."""
        passed: list[tuple[Rank, BlockKey]] = []
        try:
            while (entry := self.first()) is not None:
                heappop(self._heap)
                passed.append(entry)
                yield entry[1]
                if entry[1] not in self._ranks:
                    passed.pop()
        finally:
            for entry in passed:
                heappush(self._heap, entry)

    def __contains__(self, key: object) -> bool:
        return key in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)
