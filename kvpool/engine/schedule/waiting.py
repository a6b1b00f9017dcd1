"""Who waits, and who comes next: the longest prefix that is here already, but nobody is passed over for long.

Theory. Whoever finds much of its prompt in the worker costs little and should come while it is still there; so of those that wait the one
with the most tokens at hand comes first (cache-aware order; SGLang calls it longest prefix match). To be fair, each time a later one
comes first those before it count it, and whoever was passed over `MAX_PASSED` times, or was preempted, or has waited `PATIENCE_NS`,
comes in order of arrival before all others. Only the first `WINDOW` that wait are compared.
"""

from collections.abc import Callable, Iterator

from kvpool.engine.schedule.work import Work
from kvpool.units import SECOND

MAX_PASSED = 8
PATIENCE_NS = 2 * SECOND
WINDOW = 32


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
        """`work`, which waits, does so no more; those before it that it overtakes count it."""
        at = self._works.index(work)
        del self._works[at]

    def overtaken(self, work: Work) -> None:
        """`work` is admitted: those that came before it were passed over."""
        for other in self._works:
            if other.order > work.order:
                return
            other.passed_over += 1

    def expired(self, now_ns: int) -> list[Work]:
        """Those whose deadline has passed."""
        return [work for work in self._works if work.deadline_ns <= now_ns]

    def next(self, now_ns: int, at_hand: Callable[[Work], int]) -> Work | None:
        """Who comes next; `at_hand` says how many of a work's tokens need no computing."""
        for work in self._works:
            if work.preempted or work.passed_over >= MAX_PASSED or now_ns - work.since_ns >= PATIENCE_NS:
                return work
        window = self._works[:WINDOW]
        return max(window, key=lambda work: (at_hand(work), -work.order)) if window else None
