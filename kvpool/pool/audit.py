"""The pool's invariants, checked from scratch.

Everything the pool keeps twice for speed is counted again here from the records alone: bytes against ledger, allocator and tenants,
references against leases and pins, slabs and what waits for holds and fences, the order of eviction against the committed blocks,
deadlines against ttls. O(n log n).
"""

from collections import Counter
from typing import NamedTuple

from kvpool.pool.allocator import aligned
from kvpool.pool.blocks import Blocks
from kvpool.pool.deadlines import NEVER_NS, Deadlines
from kvpool.pool.fences import Fences
from kvpool.pool.leases import Leases
from kvpool.pool.pens import Pens
from kvpool.pool.pins import Pins
from kvpool.pool.resident import State
from kvpool.pool.story import InvariantError, Story


class Parts(NamedTuple):
    """The parts of one pool that must agree with each other."""

    blocks: Blocks
    leases: Leases
    pins: Pins
    pens: Pens
    story: Story
    expiries: Deadlines[bytes]
    fences: Fences
    hard_bytes: int


def audit(parts: Parts) -> None:
    """Raise `InvariantError` when any two parts disagree."""
    parts.blocks.allocator.check()
    _check_states(parts)
    _check_references(parts)
    _check_waiting(parts)
    _check_pins(parts)
    _check_bytes(parts)
    _check_pens(parts)


def _check_states(parts: Parts) -> None:
    blocks, error = parts.blocks, parts.story.error
    for expected, index in ((State.COMMITTED, blocks.committed), (State.RESERVED, blocks.reserved)):
        for key, block in index.items():
            if block.key != key or block.state is not expected:
                raise error(f"indexed as {expected.name} under {key.hex()}, is {block.state.name}", block.key)
            if blocks.extents.get(block.location.offset) is not block:
                raise error(f"another block lies at its offset {block.location.offset}", key)
    doomed = 0
    for offset, block in blocks.extents.items():
        doomed += block.state is State.DOOMED
        if block.location.offset != offset or block.state is State.ABSENT:
            raise error(f"found at {offset}, is {block.state.name} at {block.location.offset}", block.key)
    if len(blocks.committed) + len(blocks.reserved) + doomed != len(blocks.extents):
        raise InvariantError("some block lies in the arena but is neither committed, reserved nor doomed")
    for block in blocks.committed.values():
        if block.key in blocks.reserved:
            raise error("committed and reserved at once", block.key)
        if (block.expires_ns != NEVER_NS) != (block.ttl_ns > 0):
            raise error(f"ttl {block.ttl_ns} ns but expires at {block.expires_ns}", block.key)
        deadline_ns = parts.expiries.get(block.key)
        if deadline_ns != (block.expires_ns if block.ttl_ns else None) and not (deadline_ns is None and block.grips):
            raise error(f"expires at {block.expires_ns}, waited for at {deadline_ns}", block.key)


def _check_bytes(parts: Parts) -> None:
    used = pinned = 0
    tenants: Counter[str] = Counter()
    blocks = parts.blocks
    for block in blocks.extents.values():
        size = blocks.allocator.size_of(block.location.offset)
        if size != block.size or size != aligned(block.location.length):
            raise parts.story.error(f"holds {block.location} of size {block.size}, the allocator says {size}", block.key)
        if block.state is State.COMMITTED and block.grips == 0:
            used += size
        else:
            pinned += size
        tenants[block.tenant] += 0 if block.near else size
    near = {key for key, block in blocks.committed.items() if block.near}
    if near != set(blocks.near):
        raise InvariantError(f"{len(near)} committed blocks are near copies, {len(blocks.near)} are known as such")
    slabs = blocks.slabs.extents()
    pinned += sum(slabs.values())
    extents = blocks.allocator.extents()
    if extents != sorted([*slabs.items(), *((offset, block.size) for offset, block in blocks.extents.items())]):
        raise InvariantError(f"{len(blocks.extents)} blocks and {len(slabs)} slabs hold {len(extents)} extents: bytes leaked or shared")
    ledger = blocks.ledger
    counted = (blocks.allocator.free_bytes, used, pinned)
    booked = (ledger.free_bytes, ledger.used_bytes, ledger.pinned_bytes)
    if counted != booked or sum(booked) != ledger.capacity_bytes or ledger.capacity_bytes != blocks.allocator.capacity_bytes:
        raise InvariantError(f"(free, used, pinned) is {counted}, booked {booked}, capacity {ledger.capacity_bytes}")
    tenants = +tenants  # those without bytes of their own are not counted
    if tenants != blocks.tenant_bytes:
        raise InvariantError(f"tenants' blocks take {dict(tenants)}, counted {blocks.tenant_bytes}")


def _check_references(parts: Parts) -> None:
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
    fenced = set(parts.fences)
    gripped = sum(block.grips > 0 for block in parts.blocks.extents.values())
    for offset, block in parts.blocks.extents.items():
        waits = block.grips or offset in parts.blocks.lingering or offset in fenced
        wanted_writers = 1 if block.state is State.RESERVED or (block.state is State.DOOMED and not waits) else 0
        if block.grips != readers[offset] + block.hard or writers[offset] != wanted_writers:
            raise parts.story.error(
                f"{block.state.name} with {block.grips} grips, hard={block.hard}; leases hold it {readers[offset]} times to read, "
                f"{writers[offset]} to write",
                block.key,
            )
    if gripped != parts.blocks.gripped:
        raise InvariantError(f"{gripped} blocks are gripped, {parts.blocks.gripped} are counted")


def _check_waiting(parts: Parts) -> None:
    """Extents that wait for a hold or a fence, slabs with their leases, blocks that move."""
    blocks = parts.blocks
    for offset, block in blocks.lingering.items():
        if blocks.extents.get(offset) is not block or block.state is not State.DOOMED or block.grips:
            raise parts.story.error(f"waits at {offset} for whoever holds it, is {block.state.name} with {block.grips} grips", block.key)
    slabs = blocks.slabs.extents()
    leased = [(lease.slab.offset, lease.slab.size) for lease in parts.leases.all() if lease.slab is not None]
    fenced = list(parts.fences)
    idle = [offset for offset in fenced if offset in slabs]
    if sorted(leased + [(offset, slabs[offset]) for offset in idle]) != sorted(slabs.items()):
        raise InvariantError(f"slabs {slabs}: leases have {leased}, fences {idle}")
    for offset in fenced:
        fenced_block = blocks.extents.get(offset)
        if offset not in slabs and (fenced_block is None or fenced_block.state is not State.DOOMED or offset in blocks.lingering):
            raise InvariantError(f"the extent at {offset} is fenced off, and neither a slab nor doomed")
    if len(set(fenced)) != len(fenced):
        raise InvariantError(f"extents fenced off twice: {fenced}")
    for key, moving in blocks.moving.items():
        if blocks.committed.get(key) is not moving or moving.grips:
            raise parts.story.error(f"moves, and is {moving.state.name} with {moving.grips} grips", key)


def _check_pins(parts: Parts) -> None:
    hard_bytes = 0
    committed = parts.blocks.committed
    for key in parts.pins:
        if key not in committed:
            raise parts.story.error("pinned, but not committed", key)
        if not committed[key].soft:
            raise parts.story.error("pinned, but evicted like any other", key)
    for block in parts.blocks.extents.values():
        pins = parts.pins.of(block.key) if block.state is State.COMMITTED else ()
        hard_bytes += block.size * block.hard
        if block.hard != any(pin.hard for pin in pins) or block.soft != bool(pins):
            raise parts.story.error(f"soft={block.soft}, hard={block.hard}, pins {pins}", block.key)
    if hard_bytes != parts.hard_bytes:
        raise InvariantError(f"hard pins hold {hard_bytes} bytes, counted {parts.hard_bytes}")


def _check_pens(parts: Parts) -> None:
    committed, pens = parts.blocks.committed, parts.pens
    for key, block in committed.items():
        pen = pens.softly if block.soft else pens.passing if block.passing else pens.policy
        if key not in pen:
            raise parts.story.error("committed, but the eviction policy doesn't know it", key)
    known = len(pens.policy) + len(pens.softly) + len(pens.passing)
    if known != len(committed):
        raise InvariantError(f"the eviction policy knows {known} blocks, {len(committed)} are committed")
