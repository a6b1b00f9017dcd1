"""The record the pool keeps of one block."""

from enum import IntEnum
from typing import Final

from kvpool.policy.eviction import Arrival
from kvpool.pool.deadlines import NEVER_NS
from kvpool.pool.values import BlockView, Holder, Location, Pin, Reserve


class State(IntEnum):
    """Where a block is in its life; the transitions are in `blocks.py`."""

    ABSENT = 0
    RESERVED = 1
    COMMITTED = 2
    DOOMED = 3


_ABSENT: Final = State.ABSENT  # a member of an enum takes time to look up, and each block looks


class Resident:
    """One block that has bytes in the arena. Mutable, owned by `PoolState`.

    `size` is what the allocator took for `location.length`; `grips` counts references of read leases and hard pins; `writer` is the id
    of the write lease it was reserved under; `expires_ns` is set at commit when it has a ttl. `dirty`: a slower tier is to have it
    and has not yet. `soft`: it is in the pen of softly pinned blocks; `hard`: one of its grips is
    for hard pins; `passing`: it was fetched from a slower tier for one reading (`pens.py`); `near`: it is a copy for readers close by;
    `unverified`: its bytes came over a wire or off a disk, and nobody has checked them on the way.
    """

    __slots__ = (
        "committed_ns", "depth", "dirty", "expires_ns", "grips", "hard", "hits",
        "key", "location", "near", "parent", "passing", "priority", "priority_ns",
        "sequence", "size", "soft", "state", "tenant", "ttl_ns", "unverified", "used_ns", "writer",
    )  # fmt: skip

    def __init__(self, item: Reserve, location: Location, size: int, writer: int) -> None:
        self.key, self.parent, self.depth, _, self.ttl_ns, self.sequence, self.priority, self.priority_ns, self.tenant, self.near = item
        self.location = location
        self.size = size
        self.writer = writer
        self.state = _ABSENT
        self.grips = 0
        self.hits = 0
        self.committed_ns = self.used_ns = 0
        self.expires_ns = NEVER_NS
        self.dirty = False
        self.soft = self.hard = self.passing = self.unverified = False

    def arrival(self) -> Arrival:
        """What an eviction policy is told of it."""
        until_ns = self.priority_until_ns if self.priority_ns else NEVER_NS
        return Arrival(self.key, self.parent, self.depth, self.location[1], self.sequence, self.priority, until_ns, self.expires_ns)

    @property
    def priority_until_ns(self) -> int:
        """When its priority ends."""
        return self.committed_ns + self.priority_ns if self.priority_ns else NEVER_NS

    def view(self, pins: tuple[Pin, ...], holders: tuple[Holder, ...]) -> BlockView:
        """What an operator is told of it."""
        return BlockView(
            key=self.key, parent=self.parent, depth=self.depth, sequence=self.sequence, location=self.location, size=self.size,
            committed_ns=self.committed_ns, used_ns=self.used_ns, hits=self.hits, expires_ns=self.expires_ns, priority=self.priority,
            priority_until_ns=self.priority_until_ns, tenant=self.tenant, dirty=self.dirty, near=self.near, pins=pins, holders=holders,
        )  # fmt: skip
