"""CLOCK: first in, first out, with a second chance for what was used since the hand last passed.

F. J. Corbató, "A Paging Experiment with the Multics System", 1968. Blocks stand in a ring; a use only sets the block's mark. The
hand looks at the oldest block: marked, it loses the mark and goes to the back; unmarked, it leaves. A use therefore costs one
write and no reordering, which is why caches under lock contention like it; the hit rate is close to LRU's.

The ring is a queue whose front is the hand. Candidates passed over keep their place at the front, so the hand meets them
again next time. A walk takes each mark at most once, so it ends.
"""

from collections import OrderedDict
from collections.abc import Generator
from itertools import islice

from kvpool.block import BlockKey
from kvpool.policy.eviction.contract import Arrival, inserted_twice
from kvpool.policy.eviction.walk import FIRST_STEP


class Clock:
    """Second chance, one mark a block. Every operation is O(1) amortised: a use pays for the hand that takes its mark."""

    __slots__ = ("_ring",)

    def __init__(self) -> None:
        self._ring: OrderedDict[BlockKey, bool] = OrderedDict()  # from the hand on; True: used since the hand passed

    def inserted(self, arrival: Arrival, now_ns: int) -> None:
        """See `EvictionPolicy.inserted`."""
        key = arrival[0]
        if key in self._ring:
            raise inserted_twice(key)
        self._ring[key] = False

    def touched(self, key: BlockKey, now_ns: int, sequence: int = 0) -> None:
        """See `EvictionPolicy.touched`."""
        if key in self._ring:
            self._ring[key] = True

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy.removed`."""
        self._ring.pop(key, None)

    def victims(self) -> Generator[BlockKey, None, None]:
        """See `EvictionPolicy.victims`."""
        ring = self._ring
        passed, step = 0, FIRST_STEP
        while passed < len(ring):
            for key in list(islice(ring, passed, passed + step)):
                if ring[key]:
                    ring[key] = False
                    ring.move_to_end(key)
                else:
                    yield key
                    passed += key in ring
            step *= 2

    def __contains__(self, key: object) -> bool:
        return key in self._ring

    def __len__(self) -> int:
        return len(self._ring)
