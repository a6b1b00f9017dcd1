"""Who waits, and who comes next: whoever has the least to compute, but nobody is passed over for ever.

Theory. Whoever finds much of its prompt in the worker costs little and should come while it is still there. So the order is that of
`kvpool.policy.order`, in which tokens that are at hand are no work: cache-aware order is a part of it. Whoever was preempted comes before
all others, in order of arrival.
"""

from collections.abc import Callable, Iterator

from kvpool.engine.schedule.work import Work
from kvpool.policy.order import place


class Waiting:
    """The works that wait, in order of arrival."""

    def __init__(self) -> None:
        self._works: list[Work] = []

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[Work]:
        return iter(self._works)

    def add(self, work: Work) -> None:
        """`work` waits, at the place its order gives it."""
        at = len(self._works)
        while at and self._works[at - 1].order > work.order:
            at -= 1
        self._works.insert(at, work)

    def remove(self, work: Work) -> None:
        """`work`, which waits, does so no more."""
        self._works.remove(work)

    def expired(self, now_ns: int) -> list[Work]:
        """Those whose deadline has passed."""
        return [work for work in self._works if work.deadline_ns <= now_ns]

    def next(self, at_hand: Callable[[Work], int]) -> Work | None:
        """Who comes next; `at_hand` says how many of a work's tokens need no computing."""
        preempted = next((work for work in self._works if work.preempted), None)
        if preempted is not None or not self._works:
            return preempted
        return min(self._works, key=lambda work: (place(work.known - at_hand(work), work.before), work.order))
