"""Time as an argument: the shell reads a `Clock`, the cores receive `now_ns`.

All deadlines inside one process are monotonic nanoseconds; durations that cross a process boundary travel as durations.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic time."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds; never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds since an arbitrary start."""
        return time.monotonic_ns()


def seconds_left(deadline_ns: int) -> float:
    """Seconds from now to the monotonic `deadline_ns`, 0 once it has passed: what waiting calls take as their time limit."""
    return max(0, deadline_ns - time.monotonic_ns()) / 1e9


class ManualClock:
    """A clock that moves only when told to: for tests and simulation."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """The time last set."""
        return self._now_ns

    def advance(self, by_ns: int) -> None:
        """Move forward by `by_ns` (>= 0)."""
        if by_ns < 0:
            raise ValueError("a clock does not go back")
        self._now_ns += by_ns
