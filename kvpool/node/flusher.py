"""Writing blocks down to the slower tier, in the background.

Theory. `TierFlow` decides, this loop does: it takes the next batch under a lease that keeps the bytes in place, lets the tier write them
in a thread of its own, and reports back. While the tier is not ok the pool doesn't wait for it (`guard` off): blocks leave unwritten,
visibly, and a batch now and then finds out whether the tier has come back.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvpool.block import BlockKey
from kvpool.clock import Clock
from kvpool.policy.eviction import NEVER_NS
from kvpool.pool import PoolState
from kvpool.pool.flow import FlowSettings, Flush, TierFlow
from kvpool.tier import Arena
from kvpool.tier.contract import Record, Tier
from kvpool.tier.memory import unix_ms
from kvpool.units import MS, SECOND

log = logging.getLogger(__name__)

PUT_NS = 20 * SECOND
"""Longest one batch may take to be written."""
_LEASE_NS = PUT_NS + 10 * SECOND
_IDLE_S = 0.5
_RETRY_S = 2.0


def records_of(pool: PoolState, arena: Arena, flush: Flush, now_ns: int) -> list[Record]:
    """The blocks of a flush as a tier takes them: views of the arena, no copies."""
    records: list[Record] = []
    for key, place in zip(flush.keys, flush.places, strict=True):
        view = pool.view(key)
        data = arena.view(place.offset, place.length)
        if view is None:  # discarded while held: its bytes stay until the lease ends, but nobody wants them
            records.append(Record(key, None, 0, data, expires_ms=1))
            continue
        left_ns = view.expires_ns - now_ns
        expires_ms = 0 if view.expires_ns == NEVER_NS else max(1, unix_ms() + left_ns // MS)
        records.append(Record(key, view.parent, view.depth, data, expires_ms, view.sequence, view.tenant))
    return records


class Flusher:
    """The loop over one pool, its arena and the tier below. `await start()`, `await stop()`; all calls on the event loop."""

    def __init__(self, pool: PoolState, arena: Arena, clock: Clock, tier: Tier, settings: FlowSettings) -> None:
        self.flow = TierFlow(pool, settings, self._stored)
        self.tier = tier
        self._pool = pool
        self._arena = arena
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, "kvpool-flush")
        self._wake = asyncio.Event()
        self._progress = asyncio.Condition()
        self._waiting = 0
        self._ok = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; from now on blocks wait for being written before they leave, if the settings say so."""
        self._pool.guard(self.flow.guards)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write down what is queued as far as `PUT_NS` allows, then end."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        deadline_ns = self._clock.now_ns() + PUT_NS
        while self._clock.now_ns() < deadline_ns and self._ok and await self._step():
            continue
        self._writer.shutdown(wait=True)

    def committed(self, keys: Sequence[BlockKey], nbytes: int) -> None:
        """Blocks were published."""
        self.flow.committed(keys, nbytes)
        self._wake.set()

    def forget(self, keys: Sequence[BlockKey]) -> "asyncio.Future[int]":
        """Remove blocks from the tier too, after what is being written; the future says how many there were."""
        return asyncio.get_running_loop().run_in_executor(self._writer, self.tier.remove, list(keys))

    async def room(self, deadline_ns: int) -> None:
        """Wait until something was written down, or the deadline."""
        self._waiting += 1
        self._wake.set()
        try:
            async with asyncio.timeout(max(0, deadline_ns - self._clock.now_ns()) / SECOND), self._progress:
                await self._progress.wait()
        except TimeoutError:
            return
        finally:
            self._waiting -= 1

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            if await self._step():
                await asyncio.sleep(0 if self._ok else _RETRY_S)
                continue
            try:
                async with asyncio.timeout(_IDLE_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _step(self) -> bool:
        """Write one batch; False when there was none."""
        now_ns = self._clock.now_ns()
        flush = self.flow.next_flush(pressed=self._waiting > 0, lease_ns=_LEASE_NS, now_ns=now_ns)
        if flush is None:
            await self._tell()
            return False
        records = records_of(self._pool, self._arena, flush, now_ns)
        stopped = await _ended(work := asyncio.get_running_loop().run_in_executor(self._writer, self._put, records, now_ns + PUT_NS))
        unwanted = self.flow.flushed(flush, work.result(), self._clock.now_ns())
        if unwanted:
            stopped = await _ended(self.forget(unwanted)) or stopped
        self._look_at_tier()
        await self._tell()
        if stopped:
            raise asyncio.CancelledError
        return True

    def _put(self, records: Sequence[Record], deadline_ns: int) -> list[bool]:
        """What the tier took. One that raises has a defect, and counts as having taken nothing: the loop must outlive it."""
        try:
            return self.tier.put(records, deadline_ns)
        except Exception:
            log.exception("tier %s failed to write %d blocks down", self.tier.name, len(records))
            return [False] * len(records)

    async def _tell(self) -> None:
        async with self._progress:
            self._progress.notify_all()

    def _look_at_tier(self) -> None:
        books = self.tier.books()
        ok = books.state == "ok"
        if ok != self._ok:
            self._ok = ok
            self._pool.guard(ok and self.flow.guards)
            if ok:
                log.warning("tier %s is ok again", self.tier.name)
            else:
                log.error("tier %s is %s: %s; blocks are kept in memory only", self.tier.name, books.state, books.reason)

    def _stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [entry is not None for entry in self.tier.find(keys, unix_ms())]


async def _ended(work: "asyncio.Future[Any]") -> bool:
    """Wait for work on the writer's thread, even when told to stop: it looks at bytes of the arena. True when told to meanwhile."""
    stopped = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            stopped = True
    return stopped
