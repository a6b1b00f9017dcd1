"""Pushing blocks of this node to others: one window of bytes in flight, no faster than told, from whatever tier has them.

Bytes of the arena are held while they are sent; what only another tier has is read from there into the staging buffer, so that pushing
what is cold displaces nothing from the arena. What turns out to be damaged here is dropped here and not sent.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor

from kvpool.block import BlockKey
from kvpool.client.frames import BATCH_BYTES, Bytes, Frame, Pushed, batches, push
from kvpool.client.links import Links
from kvpool.client.sources import NodeRef
from kvpool.client.transfer import Stages
from kvpool.clock import Clock
from kvpool.node.handler import NodeHandler, stored_block
from kvpool.node.tiers import Tiers
from kvpool.policy.bucket import TokenBucket
from kvpool.pool import PoolState
from kvpool.request.pool import Stored
from kvpool.tier import Arena
from kvpool.tier.contract import Entry, Tier
from kvpool.tier.memory import unix_ms
from kvpool.units import SECOND

log = logging.getLogger(__name__)

OWNER = "balance"
BATCH_NS = 20 * SECOND
"""Longest one batch may take."""
_LEASE_NS = BATCH_NS + 10 * SECOND
_CONNECT_S = 2.0
_STEP_S = 0.2


class Pusher:
    """Pushes for one node. `handler` drops what is damaged. On the event loop."""

    def __init__(
        self,
        pool: PoolState,
        arena: Arena,
        tiers: Tiers,
        clock: Clock,
        links: Links,
        threads: Executor,
        bucket: TokenBucket,
        handler: NodeHandler,
    ) -> None:
        self._pool = pool
        self._arena = arena
        self._tiers = tiers
        self._clock = clock
        self._links = links
        self._threads = threads
        self._handler = handler
        self._stages = Stages(BATCH_BYTES, keep=1)
        self._turn = asyncio.Lock()
        self.bucket = bucket
        self.counters = dict.fromkeys(("pushed", "pushed_bytes", "push_refused", "push_failed"), 0)

    async def push(self, ref: NodeRef, keys: Sequence[BlockKey], *, near: bool = False) -> set[BlockKey]:
        """Make these blocks present on the node of `ref`, in the order given; which of them were sent and committed.

        Raises `RemoteError` when the node fails; what was sent before counts all the same.
        """
        frames = [frame for key in keys if (frame := self._frame(key)) is not None]
        sent: set[BlockKey] = set()
        for batch in batches(frames):
            async with self._turn:
                delay_ns = self.bucket.take(sum(frame.stored.length for frame in batch), self._clock.now_ns())
                while delay_ns:  # in steps: the rate may change meanwhile
                    await asyncio.sleep(min(_STEP_S, delay_ns / SECOND))
                    delay_ns = self.bucket.debt_ns(self._clock.now_ns())
                sent |= await self._one(ref, batch, near=near)
        return sent

    async def _one(self, ref: NodeRef, planned: list[Frame], *, near: bool) -> set[BlockKey]:
        link = await self._links.link(ref, _CONNECT_S)
        batch = [frame for one in planned if (frame := self._frame(one.key)) is not None]  # their times went on while they waited
        if not batch:
            return set()
        keys = [frame.key for frame in batch]
        now_ns = self._clock.now_ns()
        held = self._pool.hold(keys, owner=OWNER, lease_ns=_LEASE_NS, now_ns=now_ns)
        places = {key: place for key, place in zip(keys, held.found, strict=True) if place is not None}
        lower = {found.entry.key: found.tier for found in self._tiers.find([key for key in keys if key not in places]) if found is not None}

        read: set[BlockKey] = set()

        def fill(wanted: Sequence[tuple[Frame, Bytes]]) -> list[bool]:
            got = self._fill(wanted, {key: self._arena.view(*place) for key, place in places.items()}, lower, now_ns + BATCH_NS)
            read.update(frame.key for (frame, _), ok in zip(wanted, got, strict=True) if ok and frame.key in lower)
            return got

        pushed = Pushed([], [], [], [])
        try:
            pushed = await push(
                link, batch, fill, owner=OWNER, stages=self._stages, threads=self._threads, deadline_ns=now_ns + BATCH_NS, near=near
            )
        finally:
            for frame in pushed.unsound:
                (self._handler.drop_damaged if frame.key in read else self._handler.examine)(frame.key)
            if held.lease_id:
                self._pool.release(held.lease_id, self._clock.now_ns())
            self.counters["pushed"] += len(pushed.written)
            self.counters["pushed_bytes"] += pushed.nbytes
            self.counters["push_refused"] += len(pushed.refused)
            self.counters["push_failed"] += len(batch) - len(pushed.written) - len(pushed.there) - len(pushed.refused)
        return {frame.key for frame in pushed.written}

    @staticmethod
    def _fill(
        wanted: Sequence[tuple[Frame, Bytes]], here: dict[BlockKey, Bytes], lower: dict[BlockKey, Tier], deadline_ns: int
    ) -> list[bool]:
        """In a worker thread: copy what is in the arena, read the rest from its tier."""
        got = dict.fromkeys((frame.key for frame, _ in wanted), False)
        reads: dict[str, tuple[Tier, list[tuple[BlockKey, Bytes]]]] = {}
        for frame, buffer in wanted:
            if frame.key in here:
                got[frame.key] = here[frame.key].size == buffer.size
                if got[frame.key]:
                    buffer[:] = here[frame.key]
            elif (tier := lower.get(frame.key)) is not None:
                reads.setdefault(tier.name, (tier, []))[1].append((frame.key, buffer))
        for tier, places in reads.values():
            got.update(zip((key for key, _ in places), tier.get(places, deadline_ns), strict=True))
        return [got[frame.key] for frame, _ in wanted]

    def _frame(self, key: BlockKey) -> Frame | None:
        """What is known of a block that is here."""
        stored = stored_block(self._pool.view(key), self._clock.now_ns())
        if stored is None:
            (found,) = self._tiers.find([key])
            stored = None if found is None else _stored_entry(found.entry)
        return None if stored is None else Frame(key, stored)


def _stored_entry(entry: Entry) -> Stored:
    ttl_ms = max(1, entry.expires_ms - unix_ms()) if entry.expires_ms else 0
    return Stored(0, entry.length, entry.parent or b"", entry.depth, ttl_ms, entry.sequence, entry.tenant)
