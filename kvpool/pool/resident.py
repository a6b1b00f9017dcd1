"""The record the pool keeps of one block."""

from enum import IntEnum

from kvpool.block import BlockKey
from kvpool.pool.deadlines import NEVER_NS
from kvpool.pool.values import Location


class State(IntEnum):
    """Where a block is in its life; the transitions are in `state.py`."""

    ABSENT = 0
    RESERVED = 1
    COMMITTED = 2
    DOOMED = 3


class Resident:
    """One block that has bytes in the arena. Mutable, owned by `PoolState`.

    `size` is what the allocator took for `location.length`; `readers` counts references of read leases; `writer` is the id of
    the write lease it was reserved under; `expires_ns` is set at commit when it has a ttl.
    """

    __slots__ = ("depth", "expires_ns", "key", "location", "parent", "readers", "size", "state", "ttl_ns", "writer")

    def __init__(self, key: BlockKey, parent: BlockKey | None, depth: int, location: Location, size: int, ttl_ns: int, writer: int) -> None:
        self.key = key
        self.parent = parent
        self.depth = depth
        self.location = location
        self.size = size
        self.ttl_ns = ttl_ns
        self.writer = writer
        self.state = State.ABSENT
        self.readers = 0
        self.expires_ns = NEVER_NS
