"""What one worker has still to compute, as far as the requests tell that were sent there: seconds each, worked off as time passes.

Theory. A worker computes by an order that is known: as they came, or the least left first but for age, as our engine does
(`kvpool.policy.order`; places are in seconds here, since a worker that somebody waits for computes a second a second). Then how long a
newcomer of s seconds has to wait, and by how much it delays those who are there already, follow from their remaining seconds r:

| order | waits for | delays the others by |
|---|---|---|
| arrival | sum of r | 0 |
| shortest | sum of the r with a lower place | s for each with a higher one |

What has been worked off isn't reported by anybody; it is taken to go on at one second a second, and a first token says what was wrong. A
request that should be through and isn't weighs nothing.
"""

from bisect import bisect_right
from enum import StrEnum

from kvpool.policy.order import place
from kvpool.units import SECOND


class WorkerOrder(StrEnum):
    """In which order a worker computes what it was given."""

    ARRIVAL = "arrival"
    SHORTEST = "shortest"


class Workload:
    """Of one worker."""

    __slots__ = ("_at_ns", "_left", "_names", "_order", "_places")

    def __init__(self, order: WorkerOrder) -> None:
        self._order = order
        self._at_ns = 0
        self._names: list[str] = []  # in the order in which they are computed, as the other two
        self._left: list[float] = []
        self._places: list[float] = []

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str, seconds: float, now_ns: int) -> None:
        """A request of `seconds` has been sent."""
        self._advance(now_ns)
        seconds = max(0.0, seconds)
        at = self._find(seconds)
        self._names.insert(at, name)
        self._left.insert(at, seconds)
        self._places.insert(at, self._place(seconds))

    def remove(self, name: str, now_ns: int) -> None:
        """A request is through, or given up; unknown ones are ignored."""
        self._advance(now_ns)
        if name in self._names:
            at = self._names.index(name)
            for each in (self._names, self._left, self._places):
                del each[at]

    def wait_s(self, seconds: float, now_ns: int) -> tuple[float, float]:
        """How long a newcomer of `seconds` waits, and the delay of all others together by it."""
        self._advance(now_ns)
        at = self._find(seconds)
        return sum(self._left[:at]), seconds * (len(self._left) - at)

    def _place(self, seconds: float) -> float:
        now_s = self._at_ns / SECOND
        return place(seconds, now_s) if self._order is WorkerOrder.SHORTEST else now_s

    def _find(self, seconds: float) -> int:
        """Before how many a newcomer doesn't come."""
        return bisect_right(self._places, self._place(seconds))

    def _advance(self, now_ns: int) -> None:
        """Work off what has passed since the last look."""
        passed = max(0, now_ns - self._at_ns) / SECOND
        self._at_ns = max(self._at_ns, now_ns)
        for at, left in enumerate(self._left):
            if passed <= 0:
                return
            done = min(passed, left)
            passed -= done
            self._left[at] = left - done
            if self._order is WorkerOrder.SHORTEST:
                self._places[at] -= done
