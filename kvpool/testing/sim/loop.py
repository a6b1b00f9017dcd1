"""Virtual time: one queue of events in order of (time, number), one thread, no clock.

Theory. Everything that happens in a simulated world is a call scheduled here. Two events of the same nanosecond run in the order in which
they were scheduled, so a run is a function of its seed alone. A timer whose reason is gone still comes up; it says so (`stale`) and isn't
counted as an event.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[..., None]


class Loop:
    """The queue. `now_ns` is the time of the event that runs; `events` counts those that had an effect."""

    __slots__ = ("_heap", "_number", "events", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self.events = 0
        self._number = 0
        self._heap: list[tuple[int, int, Action, tuple[Any, ...]]] = []

    def at(self, time_ns: int, action: Action, *arguments: Any) -> None:
        """Call `action(*arguments)` at `time_ns`, or now when that is past."""
        self._number += 1
        heappush(self._heap, (time_ns if time_ns > self.now_ns else self.now_ns, self._number, action, arguments))

    def after(self, delay_ns: int, action: Action, *arguments: Any) -> None:
        """Call `action(*arguments)` in `delay_ns`."""
        self._number += 1
        heappush(self._heap, (self.now_ns + delay_ns, self._number, action, arguments))

    def stale(self) -> None:
        """The event that runs had nothing to do."""
        self.events -= 1

    def run(self, *, events: int, until_ns: int = 1 << 62) -> bool:
        """Run until `events` have been counted in all or the next one is later than `until_ns`; False when the queue ran dry first."""
        heap = self._heap
        while heap:
            if self.events >= events or heap[0][0] > until_ns:
                return True
            self.now_ns, _, action, arguments = heappop(heap)
            self.events += 1
            action(*arguments)
        return False
