"""Single-flight: a cold prefix that many want at once is computed by one of them, the others wait for it.

`kvpool.policy.admission.single` says who leads and who follows; here are the waits. A follower waits until its leader has published, has
failed, or is overdue (`timeout_s`, or three times what was expected, after a worker began). Then it looks again: what is there now, who
else computes the rest, and if nobody does it leads itself. So of the followers of a leader that died, the first one to wake is the next
leader and the others follow it. Nobody follows more than `MAX_FOLLOWED` leaders, nor beyond its own deadline.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.block import BlockKey
from kvpool.clock import Clock
from kvpool.policy.admission.single import Flight, Flights
from kvpool.units import SECOND

MAX_FOLLOWED = 3
_LOOK_S = 1.0
_LENIENCY = 3.0
"""How many times as long as expected a leader may take."""


@dataclass(slots=True, eq=False)
class Led:
    """What a request computes for others too."""

    flight: Flight
    over: asyncio.Future[None]
    overdue_ns: int = 0
    """When its followers give it up; set when a worker begins."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Since the start: requests that led, that followed, leaders that were given up by their followers, and requests promoted to lead."""

    led: int = 0
    followed: int = 0
    overdue: int = 0
    promoted: int = 0


class SharedWork:
    """The flights of one router. Lives on one event loop."""

    def __init__(self, clock: Clock, *, least_tokens: int, timeout_s: float) -> None:
        """Fewer than `least_tokens` common tokens aren't worth a wait; 0: nothing is."""
        self._clock = clock
        self._least = least_tokens
        self._timeout_ns = int(timeout_s * SECOND)
        self._flights = Flights()
        self._led: dict[Flight, Led] = {}
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._led)

    async def join(
        self, request_id: str, keys: Sequence[BlockKey], held: int, *, block_tokens: int, priority: int, deadline_ns: int
    ) -> tuple[int, Led | None, int]:
        """Wait while others compute what of `keys` isn't there; `held` leading blocks are.

        Returns how many are there then, what the request is to compute for all if it is worth telling, and how many leaders it followed.
        """
        followed = 0
        if not self._least:
            return held, None, followed
        while followed < MAX_FOLLOWED and self._clock.now_ns() < deadline_ns:
            found = self._flights.find(keys, held, priority=priority)
            if found is None or found[1] * block_tokens < self._least:
                break
            flight, blocks = found
            followed += 1
            self.counts.followed += 1
            flight.followers += 1
            try:
                await self._wait(self._led[flight], deadline_ns)
            finally:
                flight.followers -= 1
            held = max(held, min(flight.held, held + blocks))
        if (len(keys) - held) * block_tokens < self._least:
            return held, None, followed
        return held, self._lead(request_id, keys, held, priority, promoted=followed > 0), followed

    def begun(self, led: Led, expected_s: float = 0.0) -> None:
        """A worker is at it, and expected to need so long (0: unknown). A retry begins anew."""
        led.flight.begun = True
        led.overdue_ns = self._clock.now_ns() + max(self._timeout_ns, int(_LENIENCY * expected_s * SECOND))

    def end(self, led: Led, held: int) -> None:
        """It is over: `held` leading blocks of its chain are in the pool. Again: nothing."""
        if self._led.pop(led.flight, None) is not None:
            self._flights.end(led.flight, held)
            led.over.set_result(None)

    def _lead(self, request_id: str, keys: Sequence[BlockKey], held: int, priority: int, *, promoted: bool) -> Led:
        flight = self._flights.lead(request_id, keys, held, priority=priority)
        led = self._led[flight] = Led(flight, asyncio.get_running_loop().create_future())
        self.counts.led += 1
        self.counts.promoted += promoted
        return led

    async def _wait(self, led: Led, deadline_ns: int) -> None:
        """Until it is over. One that takes too long is given up, for all its followers."""
        while not led.over.done():
            now_ns = self._clock.now_ns()
            end_ns = min(deadline_ns, led.overdue_ns) if led.flight.begun else deadline_ns
            if now_ns >= end_ns:
                if now_ns < deadline_ns:
                    self.counts.overdue += 1
                    self.end(led, led.flight.first)
                return
            await asyncio.wait([led.over], timeout=min(_LOOK_S, (end_ns - now_ns) / SECOND))
