"""A node's events in memory: `EventsHandler` over a `KvEvents` that a test fills, before it is watched or step by step while it is."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from kvpool.errors import UnavailableError
from kvpool.pool.events import DEFAULT_RING, KvEvents
from kvpool.request.events import MAX_WATCHERS, EventBatch
from kvpool.wire.fence import NodeIdentity

_KEEPALIVE_S = 0.02


class MemoryEvents:
    """The twin. `later`: what happens once a consumer has read all there was, one step at a time. `open` False: the node stops."""

    def __init__(self, identity: NodeIdentity, *, ring: int = DEFAULT_RING, watchers: int = MAX_WATCHERS) -> None:
        self.identity = identity
        self.events = KvEvents(identity.incarnation, ring)
        self.later: list[Callable[[], None]] = []
        self.open = True
        self.watchers = 0
        self._max_watchers = watchers

    async def watch(self, incarnation: int, sequence: int) -> AsyncGenerator[EventBatch, None]:
        """See `EventsHandler.watch`."""
        if self.watchers >= self._max_watchers:
            raise UnavailableError(f"{self.watchers} consumers watch this node already")
        reader = self.events.watch(incarnation, sequence)
        self.watchers += 1
        try:
            while self.open:
                batch = reader.next()
                if batch is None and self.later:
                    self.later.pop(0)()
                    continue
                if batch is None:
                    await asyncio.sleep(_KEEPALIVE_S)
                yield batch or reader.idle()
        finally:
            self.watchers -= 1
        raise UnavailableError("the node stops")
