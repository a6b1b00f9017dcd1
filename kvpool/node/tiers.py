"""The tiers of one node around its arena: what is below (SSD), what is beside (GPU memory), and how blocks come back up.

Readers and writers only ever see the arena. A block that an `acquire` wants and that only another tier has is *brought*: room is reserved
for it, the tier reads and verifies it straight into the arena, it is committed, and then leased like any other. Many who want the same
block at once share one reading. A block brought for the first time is *passing* (the first to leave); used again, it is admitted. The tier
vouches for what it was given, which nobody may have checked, so what is brought is unverified. What is hot is copied into GPU memory, if
there is any; to make room there, blocks that nothing else holds go back to the arena and from there down.

Reading goes on when the caller has given up: the next one finds the block.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kvpool.block import BlockKey
from kvpool.clock import Clock
from kvpool.node.flusher import Flusher
from kvpool.policy.eviction import NEVER_NS
from kvpool.pool import Granted, Move, PoolState, Reserve, Reserved, SlabGrant
from kvpool.pool.flow import FlowSettings
from kvpool.pool.values import NEAR
from kvpool.request.events import BELOW, BESIDE
from kvpool.tier import Arena
from kvpool.tier.contract import Entry, Record, Tier
from kvpool.tier.memory import unix_ms
from kvpool.units import MS, SECOND

log = logging.getLogger(__name__)

_READERS = 4
_READ_NS = 20 * SECOND
_READ_LEASE_NS = _READ_NS + 10 * SECOND
"""Renewed for as long as the reading takes: a transfer that has begun may take longer than its deadline."""
_LIFT_NS = 5 * SECOND
_MAX_LIFTS = 4096
_MAX_SINKS = 8
OWNER = "promotion"
"""Holds and writes what comes up."""


class Found(NamedTuple):
    """A block that a tier other than the arena holds."""

    tier: Tier
    entry: Entry


def carry_out(pool: PoolState, arena: Arena, moves: Sequence[Move]) -> None:
    """Copy inside the arena what a reservation or a slab moved, and tell the pool. At once: nothing may come between."""
    for source, target, size in moves:
        arena.view(target, size)[:] = arena.view(source, size)
    pool.moved(moves)


class Tiers:
    """`below`: the tier blocks are written down to. `beside`: the one hot blocks are copied to. All calls on the event loop."""

    def __init__(
        self, pool: PoolState, arena: Arena, clock: Clock, *, below: Tier | None, beside: Tier | None, settings: FlowSettings
    ) -> None:
        self.below = below
        self.beside = beside
        self.flusher = None if below is None else Flusher(pool, arena, clock, below, settings)
        self._pool = pool
        self._arena = arena
        self._clock = clock
        self._readers = ThreadPoolExecutor(_READERS, "kvpool-bring")
        self._coming: dict[BlockKey, asyncio.Future[None]] = {}
        self._lifting: dict[BlockKey, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.counters = dict.fromkeys(("brought", "brought_bytes", "bring_failed", "lifted", "sunk"), 0)

    def start(self) -> None:
        """Begin to write down."""
        if self.flusher is not None:
            self.flusher.start()

    async def stop(self) -> None:
        """Let what runs end (bounded), write down what is queued, close the tiers."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_READ_NS / SECOND)
        if self.flusher is not None:
            await self.flusher.stop()
        self._readers.shutdown(wait=True)
        for tier in self.all():
            await asyncio.to_thread(tier.close)

    def all(self) -> list[Tier]:
        """The tiers there are, fastest first."""
        return [tier for tier in (self.beside, self.below) if tier is not None]

    def find(self, keys: Sequence[BlockKey]) -> list[Found | None]:
        """Where else than in the arena each key is, the fastest tier first. No I/O."""
        found: list[Found | None] = [None] * len(keys)
        for tier in self.all():
            for at, entry in enumerate(tier.find(keys, unix_ms())):
                if entry is not None and found[at] is None:
                    found[at] = Found(tier, entry)
        return found

    def present(self, keys: Sequence[BlockKey], in_arena: bytes) -> bytes:
        """One byte a key: `DRAM`, `BESIDE`, `BELOW` of `kvpool.request.events`, or 0, given which are in the arena."""
        missing = [at for at, there in enumerate(in_arena) if not there]
        if not missing:
            return in_arena
        answer = bytearray(in_arena)
        for at, found in zip(missing, self.find([keys[at] for at in missing]), strict=True):
            if found is not None:
                answer[at] = BELOW if found.tier is self.below else BESIDE
        return bytes(answer)

    def has_any(self, keys: Sequence[BlockKey]) -> bool:
        """Whether another tier holds one of `keys`, or is being read for it."""
        return any(key in self._coming for key in keys) or any(found is not None for found in self.find(keys))

    def counted(self) -> dict[str, int]:
        """Totals since the start: blocks brought up and written down; nothing where there are no other tiers."""
        if not self.all():
            return {}
        return {**self.counters, **(self.flusher.flow.counters if self.flusher is not None else {})}

    def committed(self, keys: Sequence[BlockKey]) -> None:
        """Blocks were published. Near copies among them go nowhere else."""
        if self.flusher is not None:
            own = [key for key in keys if (link := self._pool.link(key)) is not None and not link[2]]
            self.flusher.committed(own, sum(place.length for key in own if (place := self._pool.locate(key)) is not None))

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Readers got these blocks: passing ones that came back are admitted, hot ones lifted."""
        if self.flusher is None:
            return
        hot = self.flusher.flow.used(
            [key for key, there in zip(keys, self._pool.lookup(keys, self._clock.now_ns()), strict=True) if there != NEAR]
        )
        self._pool.admit(hot, self._clock.now_ns())
        if self.beside is not None and hot and len(self._lifting) < _MAX_LIFTS:
            fresh = [key for key in hot if key not in self._lifting]
            self._lifting.update(dict.fromkeys(fresh))
            self._spawn(self._lift(self.beside, fresh))

    async def bring(self, keys: Sequence[BlockKey], deadline_ns: int) -> None:
        """Get those of `keys` that other tiers hold into the arena, as far as there is room and time."""
        fresh: list[Found] = []
        waits = [self._coming[key] for key in keys if key in self._coming]
        for key, found in zip(keys, self.find(keys), strict=True):
            if found is not None and key not in self._coming:
                fresh.append(found)
                waits.append(self._coming.setdefault(key, asyncio.get_running_loop().create_future()))
        if fresh:
            self._spawn(self._fetch(fresh))
        if waits:
            await asyncio.wait(waits, timeout=max(0, deadline_ns - self._clock.now_ns()) / SECOND)

    async def reserve(self, items: Sequence[Reserve], *, owner: str, lease_ns: int, deadline_ns: int) -> Reserved:
        """`PoolState.reserve`, moves carried out; waits for dirty blocks to be written down when that will make room."""
        while True:
            now_ns = self._clock.now_ns()
            answer = self.reserve_now(items, owner=owner, lease_ns=lease_ns)
            if not answer.waiting or now_ns >= deadline_ns or self.flusher is None:
                return answer
            if answer.lease_id:
                self._pool.release(answer.lease_id, now_ns)
            await self.flusher.room(deadline_ns)

    def reserve_now(self, items: Sequence[Reserve], *, owner: str, lease_ns: int) -> Reserved:
        """`PoolState.reserve`, moves carried out. What would have to wait is said to be `waiting`."""
        answer = self._pool.reserve(items, owner=owner, lease_ns=lease_ns, now_ns=self._clock.now_ns())
        carry_out(self._pool, self._arena, answer.moves)
        return answer

    def slab_now(self, nbytes: int, *, owner: str, lease_ns: int) -> SlabGrant | None:
        """`PoolState.grant_slab`, moves carried out."""
        grant = self._pool.grant_slab(nbytes, owner=owner, lease_ns=lease_ns, now_ns=self._clock.now_ns())
        if grant is not None:
            carry_out(self._pool, self._arena, grant.moves)
        return grant

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Blocks are damaged or unwanted: gone from every tier."""
        if self.flusher is not None:
            self.flusher.forget(keys)
        if self.beside is not None:
            self._readers.submit(self.beside.remove, list(keys))

    async def remove(self, keys: Sequence[BlockKey]) -> int:
        """`forget`, waited for; how many copies there were."""
        count = 0
        if self.flusher is not None:
            count += await self.flusher.forget(keys)
        if self.beside is not None:
            count += await asyncio.get_running_loop().run_in_executor(self._readers, self.beside.remove, list(keys))
        return count

    async def _fetch(self, wanted: Sequence[Found], *, passing: bool = True) -> None:
        try:
            items = [_reservation(found.entry) for found in wanted]
            deadline_ns = self._clock.now_ns() + _READ_NS
            answer = await self.reserve(items, owner=OWNER, lease_ns=_READ_LEASE_NS, deadline_ns=self._clock.now_ns() + SECOND)
            granted = [(found, grant) for found, grant in zip(wanted, answer.grants, strict=True) if isinstance(grant, Granted)]
            if not granted:
                return
            for tier in self.all():
                mine = [(found.entry, grant.offset) for found, grant in granted if found.tier is tier]
                if mine:
                    await self._read(tier, mine, answer.lease_id, deadline_ns, passing=passing)
            self._pool.release(answer.lease_id, self._clock.now_ns())
        finally:
            for found in wanted:
                future = self._coming.pop(found.entry.key, None)
                if future is not None and not future.done():
                    future.set_result(None)

    async def _read(self, tier: Tier, places: list[tuple[Entry, int]], lease_id: int, deadline_ns: int, *, passing: bool) -> None:
        """Fill reserved places from a tier and publish what came whole."""
        wanted = [(entry.key, self._arena.view(offset, entry.length)) for entry, offset in places]
        reading = asyncio.get_running_loop().run_in_executor(self._readers, tier.get, wanted, deadline_ns)
        while not (await asyncio.wait([reading], timeout=_READ_LEASE_NS / 3 / SECOND))[0]:
            self._pool.renew(lease_id, _READ_LEASE_NS, self._clock.now_ns())
        whole = [entry for (entry, _), ok in zip(places, reading.result(), strict=True) if ok]
        clean = tier is self.below or self.below is None
        keys = [entry.key for entry in whole]
        done = self._pool.commit(lease_id, keys, self._clock.now_ns(), clean=clean, passing=passing, unverified=True)
        self.counters["brought"] += sum(done)
        self.counters["brought_bytes"] += sum(entry.length for entry, ok in zip(whole, done, strict=True) if ok)
        self.counters["bring_failed"] += len(places) - sum(done)
        if not clean:
            self.committed([entry.key for entry in whole])

    async def _lift(self, beside: Tier, keys: Sequence[BlockKey]) -> None:
        """Copy hot blocks into the faster tier; while it is full, sink its coldest (a prefix-aware order names only tails at a time)."""
        left = keys
        try:
            for _ in range(_MAX_SINKS):
                left = [key for key, entry in zip(left, beside.find(left), strict=True) if entry is None]
                now_ns = self._clock.now_ns()
                held = self._pool.hold(left, owner=OWNER, lease_ns=_LIFT_NS + 10 * SECOND, now_ns=now_ns)
                if not held.lease_id:
                    return
                views = {key: self._pool.view(key) for key, place in zip(left, held.found, strict=True) if place is not None}
                records = [
                    Record(v.key, v.parent, v.depth, self._arena.view(*v.location), 0, v.sequence, v.tenant)
                    for v in views.values()
                    if v is not None and v.expires_ns == NEVER_NS and not v.near
                ]
                run = asyncio.get_running_loop().run_in_executor
                stored = await run(self._readers, beside.put, records, now_ns + _LIFT_NS)
                self._pool.release(held.lease_id, self._clock.now_ns())
                self.counters["lifted"] += sum(stored)
                missing = sum(record.data.size for record, ok in zip(records, stored, strict=True) if not ok)
                if not missing:
                    return
                await self._sink(beside, missing)
        finally:
            for key in keys:
                self._lifting.pop(key, None)

    async def _sink(self, beside: Tier, nbytes: int) -> None:
        """Make room beside: its coldest go; those that nobody else holds go back to the arena first."""
        coldest = beside.coldest(nbytes)
        below = self.below.find(coldest) if self.below is not None else [None] * len(coldest)
        alone = [key for key, entry in zip(coldest, below, strict=True) if entry is None and self._pool.locate(key) is None]
        entries = [entry for entry in beside.find(alone) if entry is not None]
        if entries:
            await self._fetch([Found(beside, entry) for entry in entries], passing=False)
        gone = [key for key in coldest if key not in alone or self._pool.locate(key) is not None]
        self.counters["sunk"] += await asyncio.get_running_loop().run_in_executor(self._readers, beside.remove, gone)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    """Nobody awaits these tasks: what goes wrong in one is said here."""
    try:
        await work
    except Exception:
        log.exception("moving blocks between tiers failed")


def _reservation(entry: Entry) -> Reserve:
    ttl_ns = max(1, entry.expires_ms - unix_ms()) * MS if entry.expires_ms else 0
    return Reserve(entry.key, entry.parent, entry.depth, entry.length, ttl_ns, entry.sequence, tenant=entry.tenant)
