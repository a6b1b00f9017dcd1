"""The in-memory twin: an arena that is a numpy array of this process, with a node that can be killed. For tests and simulation."""

from collections.abc import Sequence

from kvpool.errors import ClosedError, UnavailableError
from kvpool.transport.copy import copy_in, copy_out
from kvpool.transport.reach import Bytes, Run, check_runs


class MemoryNode:
    """The far side: an array, alive until told otherwise."""

    def __init__(self, arena: Bytes) -> None:
        self.arena = arena
        self.alive = True

    def kill(self) -> None:
        """From now on every reach to it fails."""
        self.alive = False


class MemoryReach:
    """`Reach` over a `MemoryNode`."""

    name = "memory"

    def __init__(self, node: MemoryNode) -> None:
        self._node: MemoryNode | None = node

    def read(self, runs: Sequence[Run], into: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.read`."""
        arena = self._arena()
        check_runs(runs, arena.size, into, writable=True)
        copy_out(arena, runs, into, deadline_ns)

    def write(self, runs: Sequence[Run], source: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.write`."""
        arena = self._arena()
        check_runs(runs, arena.size, source, writable=False)
        copy_in(arena, runs, source, deadline_ns)

    def close(self) -> None:
        """Forget the node; twice is fine."""
        self._node = None

    def _arena(self) -> Bytes:
        node = self._node
        if node is None:
            raise ClosedError("this reach is closed; open another one")
        if not node.alive:
            raise UnavailableError("the node is gone")
        return node.arena
