"""Bytes whose writer may still be writing, though its lease has run out: nobody else has them until their fence is over.

A writer that was stopped, or whose transfer is on its way, doesn't know that its time is up. A reader who checks checksums
survives that; one who relies on a block's bytes being final doesn't. So such extents wait. All wait equally long, from when the end of the
lease is noticed: a node and its writers may have stood still together (a paused container), and then go on together. So a queue does.
"""

from collections import deque
from collections.abc import Iterator

from kvpool.pool.deadlines import NEVER_NS


class Fences:
    """Offsets of extents that wait, the first to end first. `fence_ns` 0: none ever does."""

    __slots__ = ("_queue", "fence_ns")

    def __init__(self, fence_ns: int) -> None:
        self.fence_ns = fence_ns
        self._queue: deque[tuple[int, int]] = deque()

    def add(self, offset: int, now_ns: int) -> None:
        """The lease over the extent at `offset` has run out; `now_ns` is no earlier than in calls before."""
        self._queue.append((now_ns + self.fence_ns, offset))

    def first_ns(self) -> int:
        """When the next one is over, far away without any."""
        return self._queue[0][0] if self._queue else NEVER_NS

    def pop_due(self, now_ns: int) -> int | None:
        """Take out an extent whose fence is over; None when there is none."""
        return self._queue.popleft()[1] if self.first_ns() <= now_ns else None

    def __iter__(self) -> Iterator[int]:
        """The offsets."""
        return (offset for _, offset in self._queue)

    def __len__(self) -> int:
        return len(self._queue)
