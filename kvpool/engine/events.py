"""What a worker holds, as told to routers: the full blocks that its next requests would find by their keys, as they come and go.

The same stream as a node's (`docs/events.md`): numbered changes, a snapshot for who has none of them or fell behind, and nothing kept for a
consumer. The block manager tells it on the event loop; a sequence's partial last block is told to nobody, since no other prompt's blocks
follow it.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Final

from kvpool.block import BlockKey
from kvpool.pool.events import KvEvents
from kvpool.request.events import BESIDE, MAX_WATCHERS, EventBatch, Pressure
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.telling import Teller

RING: Final = 1 << 14
"""Changes that a worker remembers."""
PULSE_S: Final = 0.02


class WorkerEvents:
    """`EventsHandler` of one engine, and the `Listener` of its block manager. Another engine is another life, with an id of its own."""

    def __init__(self, *, ring: int = RING, watchers: int = MAX_WATCHERS) -> None:
        self.identity = NodeIdentity(uuid.uuid4().hex, time.time_ns() // 1_000_000)
        self._events = KvEvents(self.identity.incarnation, ring)
        self._teller = Teller("worker", self._events.watch, watchers=watchers, pulse_s=PULSE_S)

    def __len__(self) -> int:
        """Blocks told of that are there."""
        return len(self._events)

    def watch(self, incarnation: int, sequence: int) -> AsyncGenerator[EventBatch, None]:
        """See `EventsHandler.watch`."""
        return self._teller.watch(incarnation, sequence)

    def named(self, key: BlockKey, parent: BlockKey | None, depth: int) -> None:
        """A full block can be found by `key`; `depth` tokens come before it."""
        self._events.stored(BESIDE, key, parent, depth)
        self._teller.tell()

    def unnamed(self, key: BlockKey) -> None:
        """It can't be found any more."""
        self._events.removed(BESIDE, key)
        self._teller.tell()

    def presses(self, pressure: Callable[[], Pressure]) -> None:
        """`pressure` says how scarce the worker's memory is; it goes with each batch."""
        self._teller.pressure = pressure

    def close(self) -> None:
        """End the consumers' streams."""
        self._teller.close()
