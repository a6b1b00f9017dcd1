"""Tells the other routers what this one keeps workers busy with and what is computed for its requests, and hears what they do.

Each router serves its reports by gRPC (`kvpool.wire.router_server`), at the address `loads` in its member record, and reads those of all
others that the view names. A router that dies breaks its stream, and what it said is dropped at once; one that falls silent is dropped by
the age of its report (`table.py`). It is tried again while the view names it. Routers know each other by those addresses.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from kvpool.clock import Clock
from kvpool.cluster import Member
from kvpool.errors import KvpoolError, UnavailableError
from kvpool.request.load import MAX_WORKERS, REPORT_S, LoadReport, RouterReport, WorkerLoad
from router.fleet import ClusterView, Fleet
from router.queue.shared import SharedWork
from router.replicas.table import LoadTable
from router.worker import ROLES

log = logging.getLogger("router.replicas")

LOADS_INFO = "loads"
"""In a router's member record: where its reports are to be had, host:port."""
MAX_LISTENERS = 64
_GAP_S = 0.005
"""Between two reports at least; what changes meanwhile is in the next one."""
_PATIENCE_S = 2.0
_FIRST_PAUSE_S = 0.2
_LAST_PAUSE_S = 5.0

Id = tuple[str, int]


class LoadsPort(Protocol):
    """A connection to another router (`kvpool.wire.router_client.RouterRpc`). Raises kvpool errors."""

    def loads(self, patience_s: float) -> AsyncGenerator[RouterReport, None]:
        """Its reports, without end."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


class Reports:
    """The `LoadsHandler` of this router."""

    def __init__(self, fleet: Fleet, shared: SharedWork) -> None:
        self._fleet = fleet
        self._shared = shared
        self._listeners = 0
        self._changed = asyncio.Event()
        self._version = 0
        shared.on_changed = self._change

    async def loads(self) -> AsyncGenerator[RouterReport, None]:
        """See `LoadsHandler`."""
        if self._listeners >= MAX_LISTENERS:
            raise UnavailableError(f"{MAX_LISTENERS} routers listen already, which is the limit")
        self._listeners += 1
        try:
            while True:
                version = self._version
                yield RouterReport(self.report(), self._shared.told())
                await asyncio.sleep(_GAP_S)
                if version == self._version:
                    await self._news()
        finally:
            self._listeners -= 1

    def _change(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _news(self) -> None:
        """Wait until it is time for a report, or the flights change."""
        try:
            async with asyncio.timeout(REPORT_S - _GAP_S):
                await self._changed.wait()
        except TimeoutError:
            return

    def report(self) -> LoadReport:
        """What this router keeps workers busy with now."""
        workers = [worker for role in ROLES for worker in self._fleet.alive(role) if worker.active]
        return tuple(WorkerLoad(*w.ref, w.active, w.queued, w.backlog_tokens, w.decode_tokens) for w in workers[:MAX_WORKERS])


class Peers:
    """Hears the other routers and tells `fleet` and `shared`. Lives on one event loop: `start`, then `await close()`."""

    def __init__(self, view: ClusterView, fleet: Fleet, shared: SharedWork, connect: Callable[[str], LoadsPort], clock: Clock) -> None:
        """`connect` makes a port from host:port."""
        self._view = view
        self._fleet = fleet
        self._shared = shared
        self._connect = connect
        self._clock = clock
        self._me = ""
        self._table = LoadTable()
        self._tasks: dict[Id, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None

    @property
    def heard(self) -> int:
        """Routers whose reports are known."""
        return len(self._table.ages(0))

    def start(self, me: str) -> None:
        """Follow the view from now on; `me` is where this router's own reports are to be had. Call on the event loop."""
        loop = asyncio.get_running_loop()
        self._me = self._shared.me = me

        def moved(members: tuple[Member, ...]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._meet, members)

        self._meet(self._view.members())
        self._unsubscribe = self._view.subscribe(moved)

    async def close(self) -> None:
        """Hear nobody any more."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        tasks = [*self._tasks.values(), *self._ending, *([self._ticking] if self._ticking else [])]
        self._tasks = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _meet(self, members: Sequence[Member]) -> None:
        """Make the streams match the view."""
        routers = [m for m in members if m.role == "router" and m.info.get(LOADS_INFO, self._me) != self._me]
        wanted = {(m.id, m.incarnation): m.info[LOADS_INFO] for m in routers}
        for gone in self._tasks.keys() - wanted.keys():
            task = self._tasks.pop(gone)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        for router in wanted.keys() - self._tasks.keys():
            self._tasks[router] = asyncio.create_task(self._follow(router, wanted[router]))
        if self._tasks and (self._ticking is None or self._ticking.done()):
            self._ticking = asyncio.create_task(self._tick())

    async def _follow(self, router: Id, address: str) -> None:
        """Hear one router for as long as the view names it."""
        pause_s, said = _FIRST_PAUSE_S, ""
        while True:
            port = self._connect(address)
            try:
                async with aclosing(port.loads(_PATIENCE_S)) as reports:
                    async for report in reports:
                        self._table.heard(router, report.workers, self._clock.now_ns())
                        self._shared.heard(address, report.flights)
                        pause_s, said = _FIRST_PAUSE_S, ""
            except KvpoolError as error:
                if str(error) != said:
                    log.warning("router %s can't be heard, trying again: %s", router[0][:8], error)
                said = str(error)
            finally:
                self._table.lost(router)
                self._shared.lost(address)
                await port.close()
            await asyncio.sleep(pause_s)
            pause_s = min(_LAST_PAUSE_S, 2 * pause_s)

    async def _tick(self) -> None:
        """While there are others: tell the fleet what they do, as far as it is known."""
        while self._tasks:
            self._fleet.shared(self._table.total(self._clock.now_ns()))
            await asyncio.sleep(REPORT_S)
        self._fleet.shared({})
