"""The pool's invariants, checked from scratch.

Everything the pool keeps twice for speed is counted again here from the records alone: bytes against ledger and allocator,
references against leases, the eviction policy's members against the committed blocks, deadlines against ttls. O(n log n).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.block import BlockKey
from kvpool.policy.eviction import EvictionPolicy
from kvpool.pool.allocator import Allocator, aligned
from kvpool.pool.deadlines import NEVER_NS, Deadlines
from kvpool.pool.leases import Leases
from kvpool.pool.ledger import Ledger
from kvpool.pool.resident import Resident, State
from kvpool.pool.story import InvariantError, Story


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one pool that must agree with each other."""

    allocator: Allocator
    ledger: Ledger
    leases: Leases
    policy: EvictionPolicy
    story: Story
    expiries: Deadlines[bytes]
    committed: Mapping[BlockKey, Resident]
    reserved: Mapping[BlockKey, Resident]
    doomed: Mapping[int, Resident]

    def blocks(self) -> list[Resident]:
        """Every block that has bytes in the arena."""
        return [*self.committed.values(), *self.reserved.values(), *self.doomed.values()]


def audit(parts: Parts) -> None:
    """Raise `InvariantError` when any two parts disagree."""
    parts.allocator.check()
    _check_states(parts)
    _check_leases(parts)
    _check_bytes(parts)
    _check_policy(parts)


def _check_states(parts: Parts) -> None:
    for expected, blocks in ((State.COMMITTED, parts.committed), (State.RESERVED, parts.reserved)):
        for key, block in blocks.items():
            if block.key != key or block.state is not expected:
                raise parts.story.error(f"indexed as {expected.name} under {key.hex()}, is {block.state.name}", block.key)
    for offset, block in parts.doomed.items():
        if block.location.offset != offset or block.state is not State.DOOMED:
            raise parts.story.error(f"among the doomed at {offset}, is {block.state.name}", block.key)
    for block in parts.committed.values():
        if block.key in parts.reserved:
            raise parts.story.error("committed and reserved at once", block.key)
        if (block.expires_ns != NEVER_NS) != (block.ttl_ns > 0):
            raise parts.story.error(f"ttl {block.ttl_ns} ns but expires at {block.expires_ns}", block.key)
        deadline_ns = parts.expiries.get(block.key)
        if deadline_ns != (block.expires_ns if block.ttl_ns else None) and not (deadline_ns is None and block.readers):
            raise parts.story.error(f"expires at {block.expires_ns}, waited for at {deadline_ns}", block.key)


def _check_bytes(parts: Parts) -> None:
    used = pinned = 0
    for block in parts.blocks():
        size = parts.allocator.size_of(block.location.offset)
        if size != block.size or size != aligned(block.location.length):
            raise parts.story.error(f"holds {block.location} of size {block.size}, the allocator says {size}", block.key)
        if block.state is State.COMMITTED and block.readers == 0:
            used += size
        else:
            pinned += size
    extents = parts.allocator.extents()
    if len(extents) != len(parts.blocks()):
        raise InvariantError(f"{len(parts.blocks())} blocks hold {len(extents)} extents: bytes leaked or shared")
    ledger = parts.ledger
    counted = (parts.allocator.free_bytes, used, pinned)
    booked = (ledger.free_bytes, ledger.used_bytes, ledger.pinned_bytes)
    if counted != booked or sum(booked) != ledger.capacity_bytes or ledger.capacity_bytes != parts.allocator.capacity_bytes:
        raise InvariantError(f"(free, used, pinned) is {counted}, booked {booked}, capacity {ledger.capacity_bytes}")


def _check_leases(parts: Parts) -> None:
    readers: Counter[int] = Counter()
    writers: Counter[int] = Counter()
    references = writes = 0
    for lease in parts.leases.all():
        for block in lease.held():
            references += 1
            (readers if lease.writes is None else writers)[block.location.offset] += 1
            if lease.writes is not None and block.writer != lease.id:
                raise parts.story.error(f"written under lease {lease.id}, reserved under {block.writer}", block.key)
        writes += lease.writes is not None
    if (references, writes) != (parts.leases.references, parts.leases.write_count):
        raise InvariantError(
            f"leases hold {references} references, {writes} write; counted {parts.leases.references}, {parts.leases.write_count}"
        )
    for block in parts.blocks():
        offset = block.location.offset
        wanted_writers = 1 if block.state is State.RESERVED or (block.state is State.DOOMED and not block.readers) else 0
        if block.readers != readers[offset] or writers[offset] != wanted_writers:
            raise parts.story.error(
                f"{block.state.name} with {block.readers} readers; leases hold it {readers[offset]} times to read, "
                f"{writers[offset]} to write",
                block.key,
            )


def _check_policy(parts: Parts) -> None:
    for key in parts.committed:
        if key not in parts.policy:
            raise parts.story.error("committed, but the eviction policy doesn't know it", key)
    if len(parts.policy) != len(parts.committed):
        raise InvariantError(f"the eviction policy knows {len(parts.policy)} blocks, {len(parts.committed)} are committed")
