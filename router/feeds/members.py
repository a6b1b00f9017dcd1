"""The blocks of pool nodes, and of workers that tell of theirs, in the prefix index: one stream for each life of each of them.

Theory. A member is followed from when the view names it until the view doesn't; its connection may break meanwhile, and what it held last
stays in the index as the hint it is. The index keeps the blocks, so a feed is only a place in the stream (`kvpool.client.feed`). What was
lost, repeated or mixed up on the way is the feed's to notice. A member that comes back is another life, and begins with nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Final, Protocol

from kvpool.block import BlockKey
from kvpool.client.feed import PATIENCE_S, Feed, follow
from kvpool.cluster import Member
from kvpool.errors import KvpoolError
from kvpool.policy.prefix import PrefixIndex
from kvpool.policy.routing import WorkerRef
from kvpool.request.events import NO_PRESSURE, EventBatch, Pressure, Stored
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.events_client import EventsRpc
from kvpool.wire.fence import NodeIdentity

log = logging.getLogger("router.feeds")

EVENTS_INFO: Final = "events"
"""A worker whose info has this serves `Events`, as every node does: ID/INCARNATION, of which life of what these are."""


class View(Protocol):
    """What is needed of `kvpool.cluster.Membership`."""

    def members(self, role: str | None = None) -> tuple[Member, ...]:
        """The last known view; never blocks."""
        ...

    def subscribe(self, callback: Callable[[tuple[Member, ...]], None]) -> Callable[[], None]:
        """Call `callback` now and after every change, on any thread; returns what ends the subscription."""
        ...


def dial(security: Security = PLAIN) -> Callable[[Member], EventsRpc]:
    """How to connect to a member's events: another life or another process at the same address refuses the call."""

    def connect(member: Member) -> EventsRpc:
        said = member.info.get(EVENTS_INFO, "")
        id, _, life = (member.id, "", member.info.get("incarnation", "")) if member.role == "node" else said.partition("/")
        return EventsRpc(member.address, NodeIdentity(id, int(life)) if life.isdigit() else None, security)

    return connect


class Feeds(Protocol):
    """What fills an index for as long as it runs."""

    def start(self) -> None:
        """From now on; call on the event loop."""
        ...

    async def close(self) -> None:
        """No more; what is in the index stays there."""
        ...

    def complete(self) -> bool:
        """Whether the index has all that the pool holds."""
        ...

    def tells(self, holder: WorkerRef) -> bool:
        """Whether the index has just what `holder` holds, by its own word: there is nothing to guess."""
        ...

    def pressure(self, holder: WorkerRef) -> Pressure:
        """How scarce memory is at `holder`, as far as it says so."""
        ...

    def counts(self) -> dict[str, int]:
        """What came and what went wrong since the start, by name."""
        ...


class IndexFeed(Feed):
    """A member's place in its stream; what it says goes into the index under `holder`."""

    def __init__(self, index: PrefixIndex[WorkerRef], holder: WorkerRef) -> None:
        super().__init__()
        self._index = index
        self._holder = holder
        self.pressure = NO_PRESSURE
        """What it said last."""

    def drop(self) -> None:
        """It holds nothing that is known."""
        self._index.cleared(self._holder)

    def take(self, batch: EventBatch) -> None:
        """Each block it tells of is on one tier now."""
        self.pressure = batch.pressure
        if batch.removed:
            self._index.removed(self._holder, batch.removed)
        for keys, parent, tier in runs_of(batch.stored):
            self._index.stored(self._holder, keys, tier, parent=parent, moved=True)


def runs_of(stored: Sequence[Stored]) -> Iterator[tuple[list[BlockKey], BlockKey | None, int]]:
    """Neighbours that follow each other in a chain, on one tier: their keys, the key before them, and the tier."""
    keys: list[BlockKey] = []
    last: BlockKey | None = None
    before, on = None, 0
    for key, parent, _, tier in stored:
        if parent == last and tier == on and parent is not None:
            keys.append(key)
        else:
            if keys:
                yield keys, before, on
            keys, before, on = [key], parent, tier
        last = key
    if keys:
        yield keys, before, on


class MemberFeeds:
    """Follows all nodes of a cluster, and the workers that tell. Lives on one event loop: `start`, then `await close()`."""

    def __init__(
        self,
        view: View,
        index: PrefixIndex[WorkerRef],
        connect: Callable[[Member], EventsRpc] | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`connect` makes a connection to a member (`dial()`); it is made anew when not even a keep-alive came for `patience_s`."""
        self._view = view
        self._index = index
        self._connect = connect or dial()
        self._patience_s = patience_s
        self._feeds: dict[WorkerRef, IndexFeed] = {}
        self._tasks: dict[WorkerRef, asyncio.Task[None]] = {}
        self._failing: dict[WorkerRef, str] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] | None = None
        self._open = False
        self.failures = 0
        """Streams that broke or couldn't be read."""

    def start(self) -> None:
        """Follow the view from now on; call on the event loop."""
        loop = asyncio.get_running_loop()

        def moved(members: tuple[Member, ...]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._meet, members)

        self._open = True
        self._meet(self._view.members())
        self._unsubscribe = self._view.subscribe(moved)

    async def close(self) -> None:
        """Stop following. What is in the index stays there."""
        self._open = False
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        tasks = [*self._tasks.values(), *self._ending]
        self._tasks = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def complete(self) -> bool:
        """Whether the index has all that all live nodes hold, as far as it may keep it."""
        nodes = {WorkerRef(member.role, member.id, member.incarnation) for member in self._view.members("node")}
        return all(self.tells(node) for node in nodes)

    def tells(self, holder: WorkerRef) -> bool:
        """Whether `holder`'s blocks are in the index by its own word, and it can be heard."""
        feed = self._feeds.get(holder)
        return feed is not None and feed.complete and holder not in self._failing

    def pressure(self, holder: WorkerRef) -> Pressure:
        """What `holder` said last of its memory."""
        feed = self._feeds.get(holder)
        return NO_PRESSURE if feed is None else feed.pressure

    def counts(self) -> dict[str, int]:
        """`failures`."""
        return {"failures": self.failures}

    def failing(self) -> dict[WorkerRef, str]:
        """Who can't be heard now, and why."""
        return dict(self._failing)

    def _meet(self, members: Sequence[Member]) -> None:
        """Make the streams match the view."""
        if not self._open:
            return
        wanted = {WorkerRef(m.role, m.id, m.incarnation): m for m in members if m.role == "node" or m.info.get(EVENTS_INFO)}
        for ref in self._feeds.keys() - wanted.keys():
            self._leave(ref)
        for ref, member in wanted.items():
            if ref not in self._feeds:
                self._feeds[ref] = IndexFeed(self._index, ref)
                self._tasks[ref] = asyncio.create_task(self._follow(ref, member))

    def _leave(self, ref: WorkerRef) -> None:
        del self._feeds[ref]
        self._failing.pop(ref, None)
        task = self._tasks.pop(ref, None)
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._index.forget(ref)

    async def _follow(self, ref: WorkerRef, member: Member) -> None:
        feed = self._feeds[ref]

        def failed(error: KvpoolError) -> None:
            self.failures += 1
            if self._failing.get(ref) != str(error):
                log.warning("the events of %s %s can't be followed now: %s", ref.role, ref.id[:8], error)
            self._failing[ref] = str(error)

        try:
            stream = follow(feed, lambda: self._connect(member), patience_s=self._patience_s, on_error=failed)
            async with aclosing(stream) as batches:
                async for _ in batches:
                    self._failing.pop(ref, None)
        except KvpoolError as error:  # it will not get better: what it says of itself can't be used
            failed(error)
