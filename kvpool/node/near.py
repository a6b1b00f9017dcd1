"""Near copies: what readers on this host ask of this node although others own it.

Theory. A reader asks the node of its own host for blocks and says who owns them (`fetch_from`). What this node doesn't hold it fetches
from the owner once, however many ask at the same time: the first one starts a *flight*, the others wait for it, each as long as its own
patience lasts; the flight lasts as long as anybody's does. An owner that fails or lacks a block is followed by the next in order; what
nobody has is a miss. What comes is kept as a near copy: against no tenant's quota, never written down or passed on, the first to leave.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from kvpool.block import BlockKey
from kvpool.client.frames import Frame, fetch
from kvpool.client.links import Links
from kvpool.client.sources import NodeRef
from kvpool.clock import Clock
from kvpool.errors import AccessError, ClosedError, DeadlineError, LimitError, RemoteError
from kvpool.node.tiers import Tiers
from kvpool.pool import Granted, PoolState, Reserve
from kvpool.tier import Arena
from kvpool.units import MS, SECOND

log = logging.getLogger(__name__)

MAX_FLIGHTS = 65_536
OWNER = "near"
"""Writes near copies."""
_LEASE_NS = 15 * SECOND
"""Longer than any flight: the longest patience of a caller and a margin."""
_BATCH = 64


class _Flight:
    """One fetch under way."""

    def __init__(self, deadline_ns: int) -> None:
        self.deadline_ns = deadline_ns
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class NearCopies:
    """Fetches what this node, `me`, lacks, from the nodes that `links` leads to. All calls on the event loop."""

    def __init__(self, me: str, pool: PoolState, arena: Arena, tiers: Tiers, clock: Clock, links: Links, threads: Executor) -> None:
        self._me = me
        self._pool = pool
        self._arena = arena
        self._tiers = tiers
        self._clock = clock
        self._links = links
        self._threads = threads
        self._flights: dict[BlockKey, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.counters = dict.fromkeys(("near_fetched", "near_fetched_bytes", "near_shared", "near_missed", "near_failed"), 0)

    @property
    def under_way(self) -> int:
        """Blocks that are being fetched."""
        return len(self._flights)

    async def fetch(self, keys: Sequence[BlockKey], order: Sequence[str], deadline_ns: int) -> None:
        """Get those of `keys` into the arena that the nodes `order` hold, until `deadline_ns`."""
        if not keys or not self._links.config.near_copies:
            return
        flights: dict[_Flight, None] = {}
        fresh: list[BlockKey] = []
        for key in dict.fromkeys(keys):
            flight = self._flights.get(key)
            if flight is None:
                fresh.append(key)
            else:
                flight.deadline_ns = max(flight.deadline_ns, deadline_ns)
                flights[flight] = None
                self.counters["near_shared"] += 1
        fresh = fresh[: MAX_FLIGHTS - len(self._flights)]
        if fresh:
            flight = _Flight(deadline_ns)
            self._flights.update(dict.fromkeys(fresh, flight))
            flights[flight] = None
            task = asyncio.get_running_loop().create_task(self._fly(flight, fresh, order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if flights:
            await asyncio.wait([flight.over for flight in flights], timeout=max(0, deadline_ns - self._clock.now_ns()) / SECOND)

    async def close(self) -> None:
        """Let no flight go on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _fly(self, flight: _Flight, keys: Sequence[BlockKey], order: Sequence[str]) -> None:
        try:
            refs = {ref.node_id: ref for ref in self._links.nodes()}
            left = list(keys)
            for node_id in order:
                ref = refs.get(node_id)
                if not left or self._clock.now_ns() >= flight.deadline_ns:
                    break
                if node_id != self._me and ref is not None and not self._links.resting(ref):
                    left = await self._from(ref, left, flight)
            self.counters["near_missed"] += len(left)
        except Exception:
            log.exception("fetching %d near copies failed", len(keys))
        finally:
            for key in keys:
                del self._flights[key]
            flight.over.set_result(None)

    async def _from(self, ref: NodeRef, keys: Sequence[BlockKey], flight: _Flight) -> list[BlockKey]:
        """Fetch from one node, some blocks at a time; what is still missing."""
        missing: list[BlockKey] = []
        for at in range(0, len(keys), _BATCH):
            some = keys[at : at + _BATCH]
            left_s = (flight.deadline_ns - self._clock.now_ns()) / SECOND
            if left_s <= 0:
                return [*missing, *keys[at:]]
            try:
                link = await self._links.link(ref, left_s)
            except (RemoteError, ClosedError) as error:
                log.warning("near copies from node %s: %s", ref.node_id[:8], error)
                self.counters["near_failed"] += 1
                return [*missing, *keys[at:]]
            writes: list[int] = []
            try:
                settle = partial(self._settle, writes)
                arena, owner = self._arena.data, f"near {self._me[:8]}"
                lease_id, frames = await fetch(
                    link, some, settle, arena, owner=owner, threads=self._threads, deadline_ns=flight.deadline_ns
                )
                came = self._publish(lease_id, frames)
            except (RemoteError, ClosedError) as error:
                log.warning("near copies from node %s: %s", ref.node_id[:8], error)
                self.counters["near_failed"] += 1
                if isinstance(error, DeadlineError):
                    await self._links.gave_up(ref, left_s, link)
                elif not isinstance(error, (AccessError, LimitError)):
                    await self._links.failed(ref, link=link)
                return [*missing, *keys[at:]]
            finally:
                for lease in writes:
                    self._pool.release(lease, self._clock.now_ns())
            missing += [key for key in some if key not in came]
        return missing

    async def _settle(self, writes: list[int], frames: Sequence[Frame]) -> tuple[int, list[int | None]]:
        """Room here for what is about to come."""
        items = [
            Reserve(frame.key, BlockKey(b.parent) if b.parent else None, b.depth, b.length, b.ttl_ms * MS, b.sequence, b.priority,
                    b.priority_ms * MS, b.tenant, near=True)
            for frame in frames for b in (frame.stored,)
        ]  # fmt: skip
        answer = await self._tiers.reserve(items, owner=OWNER, lease_ns=_LEASE_NS, deadline_ns=self._clock.now_ns())
        if answer.lease_id:
            writes.append(answer.lease_id)
        return answer.lease_id, [grant.offset if isinstance(grant, Granted) else None for grant in answer.grants]

    def _publish(self, lease_id: int, frames: Sequence[Frame]) -> set[BlockKey]:
        keys = [frame.key for frame in frames]
        done = self._pool.commit(lease_id, keys, self._clock.now_ns(), clean=True) if keys else ()
        came = [frame for frame, ok in zip(frames, done, strict=True) if ok]
        self.counters["near_fetched"] += len(came)
        self.counters["near_fetched_bytes"] += sum(frame.stored.length for frame in came)
        return {frame.key for frame in came}
