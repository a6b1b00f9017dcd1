"""What one worker has still to compute, as far as the requests tell that were sent there: seconds each, worked off as time passes.

Theory. A worker computes by an order that is known: as they came, all by turns, or what is nearest its end first. Then how long a newcomer
of s seconds has to wait, and by how much it delays those who are there already, follow from their remaining seconds r:

| order | waits for | delays the others by |
|---|---|---|
| arrival | sum of r | 0 |
| shared | sum of min(r, s) | sum of min(r, s) |
| shortest | sum of r up to s | s for each r above s |

All are continuous in s and r. What has been worked off isn't reported by anybody; it is taken to go on at one second a second, and
a first token says what was wrong. A request that should be through and isn't weighs nothing.
"""

from bisect import bisect_right, insort
from enum import StrEnum

from kvpool.units import SECOND


class WorkerOrder(StrEnum):
    """In which order a worker computes what it was given."""

    ARRIVAL = "arrival"
    SHARED = "shared"
    SHORTEST = "shortest"


class Workload:
    """Of one worker."""

    __slots__ = ("_ahead", "_at_ns", "_left", "_names", "_order", "_worked")

    def __init__(self, order: WorkerOrder) -> None:
        self._order = order
        self._at_ns = 0
        self._left: list[float] = []  # seconds left (arrival: in that order; else ascending) plus _worked
        self._names: list[str] = []
        self._worked = 0.0  # shared: seconds that each has been worked on since it came or since 0
        self._ahead = 0.0  # sum of what is left

    def __len__(self) -> int:
        return len(self._left)

    def add(self, name: str, seconds: float, now_ns: int) -> None:
        """A request of `seconds` has been sent."""
        self._advance(now_ns)
        seconds = max(0.0, seconds)
        self._ahead += seconds
        left = seconds + self._worked
        if self._order is WorkerOrder.ARRIVAL:
            self._left.append(left)
            self._names.append(name)
            return
        place = bisect_right(self._left, left)
        insort(self._left, left)
        self._names.insert(place, name)

    def remove(self, name: str, now_ns: int) -> None:
        """A request is through, or given up; unknown ones are ignored."""
        self._advance(now_ns)
        if name in self._names:
            place = self._names.index(name)
            del self._names[place]
            self._ahead -= max(0.0, self._left.pop(place) - self._worked)
        if not self._names:
            self._worked = self._ahead = 0.0

    def wait_s(self, seconds: float, now_ns: int) -> tuple[float, float]:
        """How long a newcomer of `seconds` waits, and the delay of all others together by it."""
        self._advance(now_ns)
        if self._order is WorkerOrder.ARRIVAL:
            return max(0.0, self._ahead), 0.0
        through = bisect_right(self._left, self._worked)
        place = max(through, bisect_right(self._left, seconds + self._worked))
        before = sum(self._left[through:place]) - (place - through) * self._worked
        behind = (len(self._left) - place) * seconds
        if self._order is WorkerOrder.SHARED:
            return max(0.0, before + behind), max(0.0, before + behind)
        return max(0.0, before), behind

    def _advance(self, now_ns: int) -> None:
        """Work off what has passed since the last look."""
        passed = max(0, now_ns - self._at_ns) / SECOND
        self._at_ns = max(self._at_ns, now_ns)
        if not self._left or not passed:
            return
        if self._order is WorkerOrder.SHARED:
            self._share(passed)
            return
        place = 0
        while passed > 0 and place < len(self._left):
            done = min(passed, self._left[place])
            self._left[place] -= done
            self._ahead -= done
            passed -= done
            place += 1

    def _share(self, passed: float) -> None:
        """By turns: each of those that are not through yet gets the same."""
        while True:
            through = bisect_right(self._left, self._worked)
            busy = len(self._left) - through
            if not busy:
                return
            most = (self._left[through] - self._worked) * busy
            if most > passed:
                self._worked += passed / busy
                self._ahead -= passed
                return
            self._worked = self._left[through]  # set, not added to: the next round passes it for certain
            self._ahead -= most
            passed -= most
