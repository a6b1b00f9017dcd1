"""The in-memory twin: an arena that is a numpy array of this process, with a node that can hang and die. For tests and simulation."""

import threading
from collections.abc import Sequence

from kvpool.clock import seconds_left
from kvpool.errors import ClosedError, UnavailableError
from kvpool.transport.copy import copy_in, copy_out
from kvpool.transport.reach import Bytes, Run, check_deadline, check_runs


class MemoryNode:
    """The far side: an array, served until told otherwise."""

    def __init__(self, arena: Bytes) -> None:
        self.arena = arena
        self.alive = True
        self.frozen = False
        self.changed = threading.Condition()

    def kill(self) -> None:
        """From now on every call of every reach to it fails, also the ones on the way."""
        self._become(alive=False, frozen=self.frozen)

    def freeze(self) -> None:
        """From now on calls hang, until `thaw`, `kill` or their deadline."""
        self._become(alive=self.alive, frozen=True)

    def thaw(self) -> None:
        """Serve again."""
        self._become(alive=self.alive, frozen=False)

    def _become(self, *, alive: bool, frozen: bool) -> None:
        with self.changed:
            self.alive, self.frozen = alive, frozen
            self.changed.notify_all()


class MemoryReach:
    """`Reach` over a `MemoryNode`."""

    name = "memory"

    def __init__(self, node: MemoryNode) -> None:
        self._node = node
        self._closed = False

    def read(self, runs: Sequence[Run], into: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.read`."""
        self._require_open()
        check_runs(runs, self._node.arena.size, into, writable=True)
        copy_out(self._served(deadline_ns), runs, into, deadline_ns)

    def write(self, runs: Sequence[Run], source: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.write`."""
        self._require_open()
        check_runs(runs, self._node.arena.size, source, writable=False)
        copy_in(self._served(deadline_ns), runs, source, deadline_ns)

    def close(self) -> None:
        """Forget the node and end calls that hang; twice is fine."""
        self._closed = True
        with self._node.changed:
            self._node.changed.notify_all()

    def _served(self, deadline_ns: int) -> Bytes:
        """The arena, once the node runs."""
        node = self._node
        check_deadline(deadline_ns)
        with node.changed:
            wait_s = seconds_left(deadline_ns)
            node.changed.wait_for(lambda: self._closed or not node.alive or not node.frozen, wait_s)
            self._require_open()
            if not node.alive:
                raise UnavailableError("the node is gone")
            if node.frozen:
                check_deadline(deadline_ns)
                raise UnavailableError("the node hangs")
        return node.arena

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this reach is closed; open another one")
