"""The books of bytes: free + used + pinned == capacity, after every step.

*free* is unallocated; *used* is committed and unleased, so eviction may take it; *pinned* is what nobody may take: reserved for
a writer, leased by a reader, or doomed (unlinked, waiting for its last lease). Every byte moves between two of the three
accounts, so the sum can't change; an account below zero is an `InvariantError` at the moment it happens.
"""

from kvpool.pool.story import InvariantError


class Ledger:
    """Three accounts of bytes that always add up to `capacity_bytes`."""

    __slots__ = ("capacity_bytes", "free_bytes", "pinned_bytes", "used_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self.used_bytes = 0
        self.pinned_bytes = 0

    def reserve(self, size: int) -> None:
        """free → pinned: granted to a writer."""
        self.free_bytes -= size
        self.pinned_bytes += size
        if self.free_bytes < 0:
            self._overdrawn()

    def pin(self, size: int) -> None:
        """used → pinned: a first reader leases it."""
        self.used_bytes -= size
        self.pinned_bytes += size
        if self.used_bytes < 0:
            self._overdrawn()

    def unpin(self, size: int) -> None:
        """pinned → used: committed, or the last reader left."""
        self.pinned_bytes -= size
        self.used_bytes += size
        if self.pinned_bytes < 0:
            self._overdrawn()

    def free_used(self, size: int) -> None:
        """used → free: evicted, expired or discarded."""
        self.used_bytes -= size
        self.free_bytes += size
        if self.used_bytes < 0:
            self._overdrawn()

    def free_pinned(self, size: int) -> None:
        """pinned → free: an abandoned reservation, or a doomed block without its last lease."""
        self.pinned_bytes -= size
        self.free_bytes += size
        if self.pinned_bytes < 0:
            self._overdrawn()

    def _overdrawn(self) -> None:
        raise InvariantError(
            f"ledger overdrawn: free {self.free_bytes}, used {self.used_bytes}, pinned {self.pinned_bytes} of {self.capacity_bytes}"
        )
