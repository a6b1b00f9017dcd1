"""Single-flight: a cold prefix that many want at once is computed by one of them, the others wait for it.

`kvpool.policy.admission.single` says who leads and who follows; here are the waits. A follower waits until its leader has published, has
failed, or is overdue (`timeout_s`, or three times what was expected, after a worker began). Then it looks again: what is there now, who
else computes the rest, and if nobody does it leads itself. It doesn't follow a leader of whom it is known when it will be through
(`Pending`), and that this takes too long: one with a long prompt, say, of which it shares only the beginning. So of the followers of a
leader that died, the first one to wake is the next leader and the others follow it. Nobody follows more than `MAX_FOLLOWED` leaders, nor
beyond its own deadline.

With other routers (`router/replicas`) their flights count too (`kvpool.policy.admission.abroad`). A new leader tells of its flight at once
and goes on after `SETTLE_S`, if nobody who goes before it has told of the same blocks meanwhile; else it follows that one. A flight of a
router that is lost, silent, or takes longer than `timeout_s` for it, is over.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.block import BlockKey
from kvpool.clock import Clock
from kvpool.policy.admission.abroad import Abroad, Elsewhere, goes_before, told, within_limits
from kvpool.policy.admission.single import Flight, Flights
from kvpool.policy.routing import Pending, WorkerRef
from kvpool.request.load import MAX_FLIGHTS, FlightTold
from kvpool.units import SECOND

MAX_FOLLOWED = 3
SETTLE_S = 0.02
"""How long news of a new flight may take to reach the other routers; nobody waits for it where there are none."""
_LOOK_S = 1.0
_LOOK_ABROAD_S = 0.2
_TOLD_NS = 2 * SECOND
"""How long the end of a flight is told: longer than what is told counts."""
_LENIENCY = 3.0
"""How many times as long as expected a leader may take."""


@dataclass(slots=True, eq=False)
class Led:
    """What a request computes for others too."""

    flight: Flight
    number: int
    over: asyncio.Future[None]
    overdue_ns: int = 0
    """When its followers give it up; set when a worker begins."""
    worker: WorkerRef | None = None
    ready_ns: int = 0
    """Who is at it, and when that one is expected to be through; None while nobody is, or it isn't known."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Since the start: requests that led, that followed, leaders that were given up by their followers, and requests promoted to lead.

    `abroad`: waits for other routers' leaders, which count as followed too.
    """

    led: int = 0
    followed: int = 0
    overdue: int = 0
    promoted: int = 0
    abroad: int = 0


@dataclass(slots=True)
class _Wait:
    """How one request has fared so far: leading blocks that are there, leaders it has followed."""

    held: int
    block_tokens: int
    waits: Callable[[Pending], bool]
    followed: int = 0


class SharedWork:
    """The flights of one router. Lives on one event loop."""

    def __init__(self, clock: Clock, *, least_tokens: int, timeout_s: float) -> None:
        """Fewer than `least_tokens` common tokens aren't worth a wait; 0: nothing is."""
        self._clock = clock
        self._least = least_tokens
        self._timeout_ns = int(timeout_s * SECOND)
        self._flights = Flights()
        self._led: dict[Flight, Led] = {}
        self._numbers = 0
        self._ended: deque[tuple[int, FlightTold]] = deque(maxlen=MAX_FLIGHTS)
        self._abroad = Abroad()
        self._moved = asyncio.Event()
        self.counts = Counts()
        self.me = ""
        """What other routers call this one; "" while it isn't one of several."""
        self.on_changed: Callable[[], None] = lambda: None
        """Called when there is something new to tell."""

    def __len__(self) -> int:
        return len(self._led)

    async def join(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        held: int,
        *,
        block_tokens: int,
        priority: int,
        deadline_ns: int,
        waits: Callable[[Pending], bool] = lambda pending: True,
    ) -> tuple[int, Led | None, int]:
        """Wait while others compute what of `keys` isn't there; `held` leading blocks are. `waits`: whether that is worth it.

        Returns how many are there then, what the request is to compute for all if it is worth telling, and how many leaders it followed.
        """
        wait = _Wait(held, block_tokens, waits)
        if not self._least:
            return held, None, 0
        least = -(-self._least // block_tokens)
        for left in reversed(range(MAX_FOLLOWED)):
            await self._follow(wait, keys, least, priority, deadline_ns)
            if len(keys) - wait.held < least:
                break
            led = self._lead(request_id, keys, wait.held, priority, promoted=wait.followed > 0)
            if not left or wait.followed >= MAX_FOLLOWED or not await self._gives_way(led, keys, least, priority):
                return wait.held, led, wait.followed
            self.end(led, led.flight.first)
        return wait.held, None, wait.followed

    def heard(self, router: str, flights: Sequence[FlightTold]) -> None:
        """What another router tells of its flights."""
        self._abroad.heard(router, flights, self._clock.now_ns())
        self._move()

    def lost(self, router: str) -> None:
        """Another router can't be heard any more."""
        self._abroad.lost(router)
        self._move()

    def told(self) -> tuple[FlightTold, ...]:
        """What the other routers are told of the flights here."""
        now_ns = self._clock.now_ns()
        while self._ended and now_ns - self._ended[0][0] > _TOLD_NS:
            self._ended.popleft()
        return within_limits([*(flight for _, flight in self._ended), *(told(led.number, led.flight) for led in self._led.values())])

    def pending(self, keys: Sequence[BlockKey], held: int, *, block_tokens: int, priority: int) -> Pending | None:
        """What a request of this router is having computed of a chain `keys`, of which `held` leading blocks are there.

        None when that isn't worth a wait, or nobody knows how long that would be.
        """
        found = self._flights.find(keys, held, priority=priority)
        if not self._least or found is None or found[1] * block_tokens < self._least:
            return None
        return self._pending(self._led[found[0]], (held + found[1]) * block_tokens)

    def begun(self, led: Led, worker: WorkerRef | None = None, expected_s: float = 0.0) -> None:
        """`worker` is at it, and expected to need so long (0: unknown). A retry begins anew."""
        led.worker, led.ready_ns = worker if expected_s else None, self._clock.now_ns() + int(expected_s * SECOND)
        if not led.flight.begun:
            led.flight.begun = True
            self.on_changed()
        led.overdue_ns = self._clock.now_ns() + max(self._timeout_ns, int(_LENIENCY * expected_s * SECOND))

    def end(self, led: Led, held: int) -> None:
        """It is over: `held` leading blocks of its chain are in the pool. Again: nothing."""
        if self._led.pop(led.flight, None) is not None:
            self._flights.end(led.flight, held)
            self._ended.append((self._clock.now_ns(), told(led.number, led.flight, over=True)))
            led.over.set_result(None)
            self.on_changed()

    def _lead(self, request_id: str, keys: Sequence[BlockKey], held: int, priority: int, *, promoted: bool) -> Led:
        flight = self._flights.lead(request_id, keys, held, priority=priority)
        self._numbers += 1
        led = self._led[flight] = Led(flight, self._numbers, asyncio.get_running_loop().create_future())
        self.counts.led += 1
        self.counts.promoted += promoted
        self.on_changed()
        return led

    async def _follow(self, wait: _Wait, keys: Sequence[BlockKey], least: int, priority: int, deadline_ns: int) -> None:
        """Wait for whoever computes the first missing block, here or elsewhere, as long as that brings `least` blocks at once."""
        while wait.followed < MAX_FOLLOWED and (now_ns := self._clock.now_ns()) < deadline_ns:
            found = self._flights.find(keys, wait.held, priority=priority)
            if found is not None and found[1] >= least:
                flight, blocks = found
                pending = self._pending(self._led[flight], (wait.held + blocks) * wait.block_tokens)
                if pending is not None and not wait.waits(pending):
                    return
                there = await self._wait_here(flight, deadline_ns)
            else:
                far = self._abroad.find(keys, wait.held, priority=priority, now_ns=now_ns)
                if far is None or far[1] < least:
                    return
                one, blocks = far
                there = await self._wait_abroad(one, deadline_ns)
            wait.followed += 1
            self.counts.followed += 1
            wait.held = max(wait.held, min(there, wait.held + blocks))

    def _pending(self, led: Led, tokens: int) -> Pending | None:
        return Pending(led.worker, tokens, led.ready_ns) if led.worker is not None else None

    async def _gives_way(self, led: Led, keys: Sequence[BlockKey], least: int, priority: int) -> bool:
        """Whether another router turns out to compute the same, and goes before."""
        first = led.flight.first
        if not self.me or not self._abroad.anybody(self._clock.now_ns()):
            return False
        try:
            await asyncio.sleep(SETTLE_S)
        except asyncio.CancelledError:
            self.end(led, first)
            raise
        rival = self._abroad.find(keys, first, priority=priority, now_ns=self._clock.now_ns())
        return rival is not None and rival[1] >= least and goes_before(rival[0], self.me)

    async def _wait_here(self, flight: Flight, deadline_ns: int) -> int:
        """Until a flight of this router is over; how many leading blocks of its chain are there then."""
        flight.followers += 1
        try:
            await self._wait(self._led[flight], deadline_ns)
        finally:
            flight.followers -= 1
        return flight.held

    async def _wait_abroad(self, one: Elsewhere, deadline_ns: int) -> int:
        """The same for a flight of another router; 0 when it isn't known."""
        self.counts.abroad += 1
        begun_ns = 0
        while (flight := self._abroad.now(one, now_ns := self._clock.now_ns())) is not None and now_ns < deadline_ns:
            if flight.over:
                return flight.held
            begun_ns = begun_ns or (now_ns if flight.begun else 0)
            if begun_ns and now_ns - begun_ns >= self._timeout_ns:
                self.counts.overdue += 1
                self._abroad.drop(one)
                return 0
            try:
                async with asyncio.timeout(_LOOK_ABROAD_S):
                    await self._moved.wait()
            except TimeoutError:
                continue
        return 0

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

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
