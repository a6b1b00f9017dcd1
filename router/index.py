"""Hints: which worker holds which prefix, as far as this router has seen.

Nothing here is trusted, only preferred: a worker that lacks a block loads or computes it. So the index may forget at will. It holds
at most `capacity` keys per worker, least recently used first to go, and touches a chain from its tail to its head so that
heads stay longest: a prefix without its head is worth nothing. Entries belong to an incarnation; a restarted worker
starts empty, whatever its address.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvpool.block import BlockKey
from kvpool.policy.routing import WorkerRef


class PrefixIndex:
    """Block keys per worker incarnation, bounded."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is the number of keys kept per worker."""
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._capacity = capacity
        self._held: dict[WorkerRef, OrderedDict[BlockKey, None]] = {}

    def learn(self, worker: WorkerRef, keys: Sequence[BlockKey]) -> None:
        """`worker` holds the chain `keys` (from its first block on); an older incarnation's entries go."""
        for other in [ref for ref in self._held if ref[:2] == worker[:2] and ref.incarnation < worker.incarnation]:
            del self._held[other]
        held = self._held.setdefault(worker, OrderedDict())
        for key in reversed(keys[: self._capacity]):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._capacity:
            held.popitem(last=False)

    def longest(self, worker: WorkerRef, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` this incarnation of `worker` holds, as far as is known. Changes nothing."""
        held = self._held.get(worker)
        if not held:
            return 0
        for count, key in enumerate(keys):
            if key not in held:
                return count
        return len(keys)

    def forget(self, worker: WorkerRef) -> None:
        """That incarnation is gone."""
        self._held.pop(worker, None)

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())
