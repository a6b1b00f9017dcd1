"""Blocks that a node leaves in place because this process looks at them."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Self

from kvpool.block import BlockKey
from kvpool.client.local import LocalReach
from kvpool.errors import ClosedError, UnavailableError
from kvpool.tier.board import BoardReader, Found, Hold
from kvpool.transport.reach import Bytes

log = logging.getLogger(__name__)

_TRIES = 2


class Held:
    """`found[:count]` under a hold, in the read-only mapping `memory`, until `release`. Also a context manager."""

    def __init__(self, reach: LocalReach, board: BoardReader, memory: Bytes, found: Found, count: int, hold: Hold) -> None:
        self.reach = reach
        self.memory = memory
        self.found = found
        self.count = count
        self._board = board
        self._hold: Hold | None = hold
        self._lock = threading.RLock()  # the garbage collector may release in the midst of a call

    @classmethod
    def take(cls, reach: LocalReach, board: BoardReader, keys: Sequence[BlockKey]) -> "Held | None":
        """Hold the leading run of `keys`, as far as this process may hold blocks of the node; None when nothing can be held."""
        if not reach.enter():
            return None
        kept = False
        try:
            memory = reach.frozen
            for _ in range(_TRIES):
                found = board.find(keys, time.monotonic_ns())
                count = min(found.leading(), reach.room_to_hold)
                hold = board.hold(found, count) if count else None
                if hold is not None:
                    kept = True
                    return cls(reach, board, memory, found, count, hold)
                if not count:
                    return None
            return None
        except (ClosedError, UnavailableError) as error:
            log.info("node %s: its arena can't be looked at: %s", reach.node_id[:8], error)
            return None
        finally:
            if not kept:
                reach.leave()

    def touch(self, count: int) -> None:
        """Tell the node that the first `count` blocks were used."""
        self._board.touch(self.found, count)

    def unchanged(self) -> bool:
        """Whether the node, which is there with this process's session, has left all of them in place since they were found."""
        return self._board.unchanged(self.found, 0, self.count) and self.reach.alive

    def release(self) -> None:
        """Let the node move and evict them again; twice is fine."""
        with self._lock:
            hold, self._hold = self._hold, None
        if hold is not None:
            hold.release()
            self.reach.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
