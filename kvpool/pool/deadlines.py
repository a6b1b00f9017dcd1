"""Deadlines in order: a heap that allows changes.

A changed or dropped deadline leaves its old heap entry behind; it is recognised as stale when it surfaces. The heap is rebuilt
when a `set` finds more than half of it stale, so it stays within twice the live deadlines (plus a little), and every operation
is O(log n) amortised.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from kvpool.policy.eviction import NEVER_NS as NEVER_NS

_Name = TypeVar("_Name", int, bytes)
_SLACK = 64


class Deadlines(Generic[_Name]):
    """Names (ids or keys) with deadlines, earliest first; equal deadlines in order of name."""

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._live: dict[_Name, int] = {}
        self._heap: list[tuple[int, _Name]] = []

    def set(self, name: _Name, deadline_ns: int) -> None:
        """Give `name` a deadline, or another one."""
        self._live[name] = deadline_ns
        heappush(self._heap, (deadline_ns, name))
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = [(deadline, name) for name, deadline in self._live.items()]
            heapify(self._heap)

    def drop(self, name: _Name) -> None:
        """Forget `name`; unknown names are ignored."""
        self._live.pop(name, None)

    def get(self, name: _Name) -> int | None:
        """The deadline of `name`, None without one."""
        return self._live.get(name)

    def first_ns(self) -> int:
        """The earliest deadline, `NEVER_NS` without any."""
        heap, live = self._heap, self._live
        while heap:
            deadline_ns, name = heap[0]
            if live.get(name) == deadline_ns:
                return deadline_ns
            heappop(heap)
        return NEVER_NS

    def pop_due(self, now_ns: int) -> _Name | None:
        """Take out the earliest name whose deadline is at or before `now_ns`; None when there is none."""
        if self.first_ns() > now_ns:
            return None
        name = heappop(self._heap)[1]
        del self._live[name]
        return name

    def due(self, now_ns: int) -> list[_Name]:
        """The names whose deadline is at or before `now_ns`, in no order that means anything. Looks at all."""
        return [name for name, deadline_ns in self._live.items() if deadline_ns <= now_ns]

    def __len__(self) -> int:
        return len(self._live)
