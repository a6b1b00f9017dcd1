"""Who may hold KV memory: sequences enter up to a count and a number of bytes, the next wait in order, the rest are refused.

A sequence reserves the bytes it may come to need, so one that has entered never fails for want of memory.
"""

import asyncio
from collections import deque

from kvpool.errors import ConfigError, UnavailableError


class OverloadedError(UnavailableError):
    """This worker holds and queues as many requests as it may; try another one or come back later."""


class Admission:
    """At most `max_active` sequences of `max_bytes` together; `max_queued` more wait, first come, first served."""

    def __init__(self, *, max_active: int, max_queued: int, max_bytes: int) -> None:
        if min(max_active, max_bytes) < 1 or max_queued < 0:
            raise ConfigError("an engine needs room for at least one active sequence and a queue of 0 or more")
        self.max_active = max_active
        self.max_queued = max_queued
        self.max_bytes = max_bytes
        self.active = 0
        self.bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def queued(self) -> int:
        """Sequences that wait."""
        return len(self._waiting)

    async def enter(self, cost: int) -> None:
        """Take a place of `cost` bytes, to be given back with `leave`.

        Raises `OverloadedError` when the queue is full and `ConfigError` when the request can't ever fit.
        """
        if cost > self.max_bytes:
            raise ConfigError(f"this request may need {cost} bytes of KV memory, the worker has {self.max_bytes}; raise --kv-memory")
        if not self._waiting and self._fits(cost):
            self._take(cost)
            return
        if len(self._waiting) >= self.max_queued:
            raise OverloadedError(f"{self.active} requests are active and {len(self._waiting)} wait; try again later or add workers")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((cost, place))
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self.leave(cost)  # the place came in the same moment
            self._admit()
            raise

    def leave(self, cost: int) -> None:
        """Give a place of `cost` bytes back; the next in the queue gets it."""
        self.active -= 1
        self.bytes -= cost
        self._admit()

    def _fits(self, cost: int) -> bool:
        return self.active < self.max_active and self.bytes + cost <= self.max_bytes

    def _take(self, cost: int) -> None:
        self.active += 1
        self.bytes += cost

    def _admit(self) -> None:
        self._waiting = deque(entry for entry in self._waiting if not entry[1].cancelled())
        while self._waiting and self._fits(self._waiting[0][0]):
            cost, place = self._waiting.popleft()
            self._take(cost)
            place.set_result(None)
