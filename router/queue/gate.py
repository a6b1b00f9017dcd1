"""The gate in front of the workers: who finds no room waits in line, and goes as soon as there is some and it is his turn.

There are two lines, for who needs a prefill first and for who goes to a decode worker directly: the one must not wait for room that only
the other needs. They share the tenants' counters, and where both could go they take turns. Between the gate and the moment in which a
worker counts the request it is *on its way*, and takes up room there already; so a thousand that come at once don't all find the same place
free.

The order is `kvpool.policy.admission.line`'s. A request leaves the line by its turn, its deadline, its caller, or because somebody else has
to have its place (`RefusedError`).
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from kvpool.clock import Clock
from kvpool.errors import UnavailableError
from kvpool.policy.admission.fairness import TokenCounters
from kvpool.policy.admission.line import Line, Waiting
from router.queue.refusal import RefusedError

PREFILL, DIRECT = "prefill", "direct"
KINDS = (PREFILL, DIRECT)
_TICK_S = 0.05
"""How often a line is looked at when nothing says that there is room: rests end, and other routers' load falls, without a word."""


@dataclass(slots=True, eq=False)
class OnItsWay:
    """A request that has passed the gate and that no worker counts yet."""

    kind: str
    _gone: Callable[[str], None]
    _open: bool = field(default=True)

    def arrived(self) -> None:
        """A worker counts it now, or it is over. Again: nothing."""
        if self._open:
            self._open = False
            self._gone(self.kind)


class Gate:
    """The lines of one router. Lives on one event loop."""

    def __init__(
        self,
        room: Callable[[str, dict[str, int]], int],
        capacity: int,
        clock: Clock,
        counters: TokenCounters,
        users: TokenCounters | None = None,
    ) -> None:
        """`room` says how many of a kind may pass now, given how many of each are on their way; `capacity` bounds each line."""
        self._room = room
        self._clock = clock
        self._counters = counters
        self._capacity = capacity
        self._lines: dict[str, Line[asyncio.Future[None]]] = {kind: Line(capacity, counters, users=users) for kind in KINDS}
        self._on_way = dict.fromkeys(KINDS, 0)
        self._last = DIRECT
        self._ticking: asyncio.Task[None] | None = None

    @property
    def lines(self) -> dict[str, int]:
        """How many wait, by kind."""
        return {kind: len(line) for kind, line in self._lines.items()}

    @property
    def on_their_way(self) -> int:
        """Requests that have passed and that no worker counts yet."""
        return sum(self._on_way.values())

    def cost_before(self, kind: str, priority: int) -> float:
        """What those cost who would go before a newcomer."""
        return self._lines[kind].cost_before(priority)

    def open_for(self, kind: str) -> bool:
        """Whether one who comes now would pass at once."""
        return not len(self._lines[kind]) and self._room(kind, self._on_way) > 0

    def poke(self) -> None:
        """There may be room: let through who can go."""
        while (kind := self._next_kind()) is not None:
            one = self._lines[kind].next(self._clock.now_ns())
            assert one is not None
            self._last = kind
            if not one.item.done():
                self._on_way[kind] += 1
                one.item.set_result(None)

    async def enter(
        self, kind: str, *, tenant: str, user: str = "", priority: int, cost: float, deadline_ns: int, again: bool = False
    ) -> OnItsWay:
        """Wait for room and one's turn. Raises `RefusedError` (the line is full of others) or `UnavailableError` (the deadline passed).

        `again`: for who has been through already; it stands in front, and isn't refused.
        """
        now_ns = self._clock.now_ns()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        one = Waiting(item=place, tenant=tenant, user=user, priority=priority, cost=cost, deadline_ns=deadline_ns, again=again)
        displaced = self._lines[kind].offer(one, now_ns)
        if displaced is not None and not displaced.item.done():
            displaced.item.set_exception(self._full(kind))
        self.poke()
        self._tick()
        try:
            await place
        except asyncio.CancelledError:
            if not self._lines[kind].discard(one) and place.done() and not place.cancelled() and place.exception() is None:
                self._gone(kind)  # the turn came in the same moment
            raise
        return OnItsWay(kind, self._gone)

    async def close(self) -> None:
        """Stop looking."""
        if self._ticking is not None:
            self._ticking.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticking

    def _gone(self, kind: str) -> None:
        self._on_way[kind] -= 1
        self.poke()

    def _next_kind(self) -> str | None:
        """Of the kinds that have somebody waiting and room, the one that didn't go last."""
        ready = [kind for kind in KINDS if len(self._lines[kind]) and self._room(kind, self._on_way) > 0]
        return next((kind for kind in ready if kind != self._last), ready[0] if ready else None)

    def _full(self, kind: str) -> RefusedError:
        message = f"{self._capacity} requests are waiting for a worker, which is this server's limit; try again shortly"
        return RefusedError("queue_full", message, 1)

    def _tick(self) -> None:
        if (self._ticking is None or self._ticking.done()) and any(self._lines.values()):
            self._ticking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        """While anybody waits: let through who can go, send away who is late."""
        while any(len(line) for line in self._lines.values()):
            await asyncio.sleep(_TICK_S)
            self.poke()
            now_ns = self._clock.now_ns()
            for line in self._lines.values():
                for one in line.expired(now_ns):
                    if not one.item.done():
                        message = f"the request's deadline passed while it waited for a worker; {len(line)} more are waiting"
                        one.item.set_exception(UnavailableError(message))


class Passage:
    """One request's way through the gate."""

    def __init__(self, gate: Gate, clock: Clock) -> None:
        self._gate = gate
        self._clock = clock
        self._way: OnItsWay | None = None
        self.waited_ns = 0

    async def enter(self, kind: str, *, tenant: str, user: str, priority: int, cost: float, deadline_ns: int, again: bool = False) -> None:
        """See `Gate.enter`."""
        self.arrived()
        began_ns = self._clock.now_ns()
        try:
            self._way = await self._gate.enter(
                kind, tenant=tenant, user=user, priority=priority, cost=cost, deadline_ns=deadline_ns, again=again
            )
        finally:
            self.waited_ns += self._clock.now_ns() - began_ns

    def arrived(self) -> None:
        """A worker counts the request now, or it is over. Again: nothing."""
        if self._way is not None:
            self._way.arrived()
            self._way = None
