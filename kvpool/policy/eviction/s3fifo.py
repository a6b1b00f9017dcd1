"""S3-FIFO: three first-in-first-out queues that get rid of one-hit wonders quickly.

Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023,
https://doi.org/10.1145/3600006.3613147. A block arrives in the *small* queue, which is to hold a tenth of the bytes; if it
was thrown out lately (its key is among the *ghosts*), in the *main* queue. A use only counts, up to three. Room is made from the
small queue while that is above its share, else from the main queue. The oldest small block moves to the main queue if it was
used since it came, with its count reset; otherwise it leaves and its key becomes a ghost. The oldest main block goes back to the
young end with its count lowered by one if that isn't zero; otherwise it leaves.

"Accessed more than once", as the paper asks of a block that moves, is read as its arrival and one use. Requiring two uses, as
some implementations do, hits less on prompt traces at most sizes.

Sizes: the small share is taken of the bytes held now, in place of a capacity; ghosts are keys only, at most as many as there are
resident blocks. A block becomes a ghost when it is removed as a candidate, not when it is discarded or its ttl ends. Each walk over the
candidates first does the moves that are due; each is paid for by a use.
"""

from collections import OrderedDict
from collections.abc import Generator
from typing import Final

from kvpool.block import BlockKey
from kvpool.policy.eviction.contract import Arrival, inserted_twice

SMALL_TENTHS: Final = 1
_MOST_USES = 3


class S3Fifo:
    """Small, main and ghost queue. Every operation is O(1) amortised."""

    __slots__ = ("_bytes", "_ghosts", "_lengths", "_main", "_offered", "_small", "_small_bytes")

    def __init__(self) -> None:
        self._small: OrderedDict[BlockKey, int] = OrderedDict()  # uses since it came, 0..3; oldest arrival first
        self._main: OrderedDict[BlockKey, int] = OrderedDict()
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()  # thrown out of small; oldest first
        self._lengths: dict[BlockKey, int] = {}
        self._bytes = 0
        self._small_bytes = 0
        self._offered: BlockKey | None = None  # the candidate the caller looks at

    def inserted(self, arrival: Arrival, now_ns: int) -> None:
        """See `EvictionPolicy.inserted`."""
        key, length = arrival[0], arrival[3]
        if key in self._lengths:
            raise inserted_twice(key)
        self._lengths[key] = length
        self._bytes += length
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0
            self._small_bytes += length

    def touched(self, key: BlockKey, now_ns: int, sequence: int = 0) -> None:
        """See `EvictionPolicy.touched`."""
        queue = self._small if key in self._small else self._main
        uses = queue.get(key)
        if uses is not None and uses < _MOST_USES:
            queue[key] = uses + 1

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy.removed`."""
        length = self._lengths.pop(key, None)
        if length is None:
            return
        self._bytes -= length
        if key not in self._small:
            del self._main[key]
            return
        del self._small[key]
        self._small_bytes -= length
        if key == self._offered:
            self._ghosts[key] = None
            while len(self._ghosts) > len(self._lengths) + 1:
                self._ghosts.popitem(last=False)

    def victims(self) -> Generator[BlockKey, None, None]:
        """See `EvictionPolicy.victims`."""
        small, main = self._small, self._main
        passed: list[tuple[OrderedDict[BlockKey, int], BlockKey, int]] = []
        try:
            while small or main:
                from_small = bool(small) and (not main or self._small_bytes * 10 >= self._bytes * SMALL_TENTHS)
                queue = small if from_small else main
                key, uses = next(iter(queue.items()))
                if from_small and uses:
                    self._to_main(key)
                elif uses:
                    main[key] = uses - 1
                    main.move_to_end(key)
                else:
                    self._offered = key
                    yield key
                    if key in self._lengths:
                        passed.append((queue, key, queue.pop(key)))
        finally:
            self._offered = None
            for queue, key, uses in reversed(passed):
                queue[key] = uses
                queue.move_to_end(key, last=False)

    def _to_main(self, key: BlockKey) -> None:
        del self._small[key]
        self._small_bytes -= self._lengths[key]
        self._main[key] = 0

    def __contains__(self, key: object) -> bool:
        return key in self._lengths

    def __len__(self) -> int:
        return len(self._lengths)
