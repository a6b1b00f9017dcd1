"""The events of a running node: brings what its tiers tell to `KvEvents`, on the event loop, and lets consumers read there.

Theory. What tells of changes must not be slowed by it, so it only appends: the arena (on the loop) and the other tiers (from their threads)
each to a list of their own. `PULSE_S` after the first of them the loop settles both: of each block and tier the latest word counts, what
came is told before what went. So a block that moves from one tier to another within a pulse is never reported to be gone.

Records of other tiers that run out are only dropped there when somebody comes across them. The node doesn't serve them any more, so they
are told to be gone when their time is over.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from kvpool.block import BlockKey
from kvpool.clock import Clock
from kvpool.pool.deadlines import Deadlines
from kvpool.pool.events import DEFAULT_RING, KvEvents
from kvpool.pool.resident import Resident, State
from kvpool.request.events import BELOW, BESIDE, DRAM, MAX_WATCHERS, NO_PRESSURE, EventBatch, Pressure
from kvpool.tier.contract import Entry, Tier, TierWatcher, is_expired
from kvpool.tier.memory import unix_ms
from kvpool.units import MS
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.telling import Teller

log = logging.getLogger(__name__)

PULSE_S = 0.02
"""How long changes are collected before they are told."""
_AT_ONCE = 2048
"""Changes settled in one step of the loop."""
_IDLE_S = 0.5


class NodeEvents:
    """`EventsHandler` of one node. `ring`: changes it remembers; `watchers`: consumers at the same time.

    `arena_changed` is the `watch` of its `PoolState`. `await start(...)` before anything is put into the tiers, `await stop()`.
    """

    def __init__(self, node_id: str, incarnation: int, clock: Clock, *, ring: int = DEFAULT_RING, watchers: int = MAX_WATCHERS) -> None:
        self.identity = NodeIdentity(node_id, incarnation)
        self.events = KvEvents(incarnation, ring)
        self._clock = clock
        self._arena: deque[Resident | BlockKey] = deque()
        self._tiers: deque[tuple[int, BlockKey, Entry | None]] = deque()
        self._expiries: dict[int, Deadlines[bytes]] = {BESIDE: Deadlines(), BELOW: Deadlines()}
        self._dirty = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._teller = Teller("node", self.events.watch, watchers=watchers)

    async def start(self, *, below: Tier | None, beside: Tier | None, pressure: Callable[[], Pressure] = lambda: NO_PRESSURE) -> None:
        """Take in what the tiers hold already, and tell of changes from now on, and with each batch how scarce memory is."""
        self._teller.pressure = pressure
        for number, tier in ((BESIDE, beside), (BELOW, below)):
            if tier is not None:
                tier.watch(self._changed_on(number, asyncio.get_running_loop()))
                await asyncio.to_thread(self._adopt, number, tier)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._over)

    async def stop(self) -> None:
        """End the consumers' streams."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    def arena_changed(self, blocks: Sequence[Resident]) -> None:
        """Blocks of the arena became readable, or stopped being so. On the loop."""
        committed = State.COMMITTED
        self._arena += [block if block.state is committed else block.key for block in blocks]  # what went isn't kept alive by this
        if not self._dirty:
            self._dirty = True
            self._wake.set()

    def watch(self, incarnation: int, sequence: int) -> AsyncGenerator[EventBatch, None]:
        """See `EventsHandler.watch`."""
        return self._teller.watch(incarnation, sequence)

    def settle(self) -> bool:
        """Bring some of what was told to `KvEvents`, at most `_AT_ONCE` changes of the arena and of the tiers; True when there is more."""
        self._dirty = False
        before = self.events.sequence
        tiers: dict[tuple[int, BlockKey], Entry | None] = {}
        for _ in range(min(_AT_ONCE, len(self._tiers))):
            number, key, entry = self._tiers.popleft()
            tiers[number, key] = entry
        arena: dict[BlockKey, Resident | None] = {}
        for _ in range(min(_AT_ONCE, len(self._arena))):
            word = self._arena.popleft()
            if isinstance(word, bytes):
                arena[word] = None
            else:
                arena[word.key] = word
        for block in arena.values():
            if block is not None:
                self.events.stored(DRAM, block.key, block.parent, block.depth)
        for (number, _), entry in tiers.items():
            if entry is not None:
                self._came(number, entry)
        for key, block in arena.items():
            if block is None:
                self.events.removed(DRAM, key)
        for (number, key), entry in tiers.items():
            if entry is None:
                self._went(number, key)
        self._end_what_is_over()
        if self.events.sequence != before:
            self._teller.tell()
        return bool(self._tiers or self._arena)

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):  # when nothing comes, something may have run out all the same
                async with asyncio.timeout(_IDLE_S):
                    await self._wake.wait()
                await asyncio.sleep(PULSE_S)
            self._wake.clear()
            while self.settle():  # noqa: ASYNC110
                await asyncio.sleep(0)

    def _changed_on(self, number: int, loop: asyncio.AbstractEventLoop) -> TierWatcher:
        """What to give to a tier: called from its threads."""

        def changed(key: BlockKey, entry: Entry | None) -> None:
            self._tiers.append((number, key, entry))
            if not self._dirty:
                self._dirty = True
                with suppress(RuntimeError):  # the loop is closed: nobody is there to be told
                    loop.call_soon_threadsafe(self._wake.set)

        return changed

    def _adopt(self, number: int, tier: Tier) -> None:
        now_ms = unix_ms()
        for entry in tier.entries():
            if not is_expired(entry.expires_ms, now_ms):
                self._came(number, entry)

    def _came(self, number: int, entry: Entry) -> None:
        self.events.stored(number, entry.key, entry.parent, entry.depth)
        if entry.expires_ms:
            self._expiries[number].set(entry.key, self._clock.now_ns() + (entry.expires_ms - unix_ms()) * MS)
        else:
            self._expiries[number].drop(entry.key)

    def _went(self, number: int, key: BlockKey) -> None:
        self.events.removed(number, key)
        self._expiries[number].drop(key)

    def _end_what_is_over(self) -> None:
        now_ns = self._clock.now_ns()
        for number, expiries in self._expiries.items():
            for _ in range(_AT_ONCE):
                key = expiries.pop_due(now_ns)
                if key is None:
                    break
                self.events.removed(number, BlockKey(key))

    def _over(self, task: asyncio.Task[None]) -> None:
        self._teller.close()
        if not task.cancelled() and task.exception() is not None:
            log.error("events are not told any more", exc_info=task.exception())
