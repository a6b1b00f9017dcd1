"""Who holds what until when.

A lease is a promise with an end. A *read* lease pins committed blocks; a *write* lease holds reservations, or a slab. It ends by release,
by its deadline, or (write) when its last reservation is finished or its slab is used up. The table is bounded twice: live leases, and block
references over all of them. Ids count up from 1 and are never used again.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from kvpool.block import BlockKey
from kvpool.pool.deadlines import NEVER_NS, Deadlines
from kvpool.pool.limits import PoolLimits
from kvpool.pool.resident import Resident
from kvpool.pool.slabs import Slab
from kvpool.pool.story import InvariantError
from kvpool.pool.values import Holder


class Lease:
    """One live lease. `reads`: one entry per reference; `writes`: reservations not finished yet, None for a read lease.

    `slab`: what a write lease has of its own to cut blocks from.
    """

    __slots__ = ("_spans", "id", "owner", "reads", "slab", "writes")

    def __init__(self, lease_id: int, owner: str, reads: list[Resident], writes: dict[BlockKey, Resident] | None) -> None:
        self.id = lease_id
        self.owner = owner
        self.reads = reads
        self.writes = writes
        self.slab: Slab | None = None
        self._spans: tuple[list[int], list[int]] | None = None

    def held(self) -> Iterable[Resident]:
        """The blocks this lease holds."""
        return self.reads if self.writes is None else self.writes.values()

    def narrowed(self) -> None:
        """The lease holds less than before: forget the cached spans."""
        self._spans = None

    def covers(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether each (offset, length) lies inside the bytes this lease holds; adjacent blocks count as one span."""
        if self._spans is None:
            extents = {(block.location.offset, block.size) for block in self.held()}
            if self.slab is not None:
                extents.add((self.slab.offset, self.slab.size))
            self._spans = _merged(sorted(extents))
        starts, ends = self._spans
        for offset, length in ranges:
            index = bisect_right(starts, offset) - 1
            if index < 0 or length <= 0 or offset + length > ends[index]:
                return False
        return True


class Leases:
    """The live leases, by id and by deadline."""

    __slots__ = ("_by_id", "_deadlines", "_last_id", "_limits", "references", "write_count")

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._by_id: dict[int, Lease] = {}
        self._deadlines: Deadlines[int] = Deadlines()
        self._last_id = 0
        self.references = 0
        self.write_count = 0

    def room_for(self, references: int) -> bool:
        """Whether one more lease over that many blocks is within the limits."""
        return len(self._by_id) < self._limits.max_leases and self.references + references <= self._limits.max_leased_blocks

    def open_read(self, owner: str, blocks: list[Resident], deadline_ns: int) -> Lease:
        """A new read lease over `blocks`."""
        self.references += len(blocks)
        return self._open(owner, blocks, None, deadline_ns)

    def open_write(self, owner: str, deadline_ns: int) -> Lease:
        """A new write lease, empty: `add_writes` its reservations."""
        self.write_count += 1
        return self._open(owner, [], {}, deadline_ns)

    def add_writes(self, lease: Lease, blocks: Iterable[Resident]) -> None:
        """Put reservations under a write lease."""
        if lease.writes is None:
            raise InvariantError(f"lease {lease.id} is for reading")
        for block in blocks:
            lease.writes[block.key] = block
            self.references += 1

    def finish_writes(self, lease: Lease, keys: Iterable[BlockKey]) -> list[Resident]:
        """Take reservations out of a write lease; those of `keys` that were under it (still)."""
        writes = lease.writes if lease.writes is not None else {}
        blocks = [block for key in keys if (block := writes.pop(key, None)) is not None]
        self.references -= len(blocks)
        lease.narrowed()
        return blocks

    def get(self, lease_id: int) -> Lease | None:
        """The live lease of that id."""
        return self._by_id.get(lease_id)

    def extend(self, lease_id: int, deadline_ns: int) -> None:
        """Move a live lease's deadline; never to an earlier time."""
        before = self._deadlines.get(lease_id)
        if before is None or deadline_ns > before:
            self._deadlines.set(lease_id, deadline_ns)

    def end(self, lease: Lease) -> None:
        """Take a lease out of the table; what it held is the caller's to settle."""
        del self._by_id[lease.id]
        self._deadlines.drop(lease.id)
        if lease.writes is None:
            self.references -= len(lease.reads)
        else:
            self.references -= len(lease.writes)
            self.write_count -= 1

    def first_deadline_ns(self) -> int:
        """The earliest deadline of all leases, far away without any."""
        return self._deadlines.first_ns()

    def overdue(self, now_ns: int) -> int:
        """How many leases have a deadline at or before `now_ns`. Looks at all."""
        return len(self._deadlines.due(now_ns))

    def due(self, now_ns: int) -> Lease | None:
        """A lease whose deadline has come, earliest first; the caller ends it. None when there is none."""
        lease_id = self._deadlines.pop_due(now_ns)
        return None if lease_id is None else self._by_id[lease_id]

    def holders(self, block: Resident) -> tuple[Holder, ...]:
        """Who leases this block now, each lease once, the oldest first. Looks at every lease."""
        held = [lease for lease in self._by_id.values() if any(one is block for one in lease.held())]
        return tuple(Holder(lease.id, lease.owner, lease.writes is not None, self._deadlines.get(lease.id) or NEVER_NS) for lease in held)

    def all(self) -> Iterable[Lease]:
        """All live leases, oldest first."""
        return self._by_id.values()

    def __len__(self) -> int:
        return len(self._by_id)

    def _open(self, owner: str, reads: list[Resident], writes: dict[BlockKey, Resident] | None, deadline_ns: int) -> Lease:
        self._last_id += 1
        lease = Lease(self._last_id, owner, reads, writes)
        self._by_id[lease.id] = lease
        self._deadlines.set(lease.id, deadline_ns)
        return lease


def _merged(extents: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Starts and ends of the maximal spans of sorted, non-overlapping (offset, size)."""
    starts: list[int] = []
    ends: list[int] = []
    for offset, size in extents:
        if ends and ends[-1] == offset:
            ends[-1] = offset + size
        else:
            starts.append(offset)
            ends.append(offset + size)
    return starts, ends
