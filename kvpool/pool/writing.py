"""The calls of those who write: *reserve* and *commit* per block, or a *slab* in advance and blocks carved out of it.

A slab saves a small writer the way to the pool before each write: it writes one block behind the other into bytes that it has already, and
says once what they are. What is granted then is readable at once; what is not (it is here already, or its tenant is at its quota) gives
its bytes back as a hole. Until it is carved, a slab counts as pinned bytes under a write lease, and belongs to no tenant.
"""

from collections.abc import Sequence

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.pool import arguments
from kvpool.pool.allocator import aligned
from kvpool.pool.leases import Lease
from kvpool.pool.resident import Resident, State
from kvpool.pool.room import Room
from kvpool.pool.steps import Steps
from kvpool.pool.story import InvariantError
from kvpool.pool.values import EXISTS, NO_SPACE, Grant, Granted, Location, Move, Reserve, Reserved, SlabGrant

_DRAINED_AT_ONCE = 64
"""Doomed blocks that one call looks at; `tick` looks at more."""


class Writing(Steps):
    """The part of `PoolState` for writers."""

    def reserve(self, items: Sequence[Reserve], *, owner: str, lease_ns: int, now_ns: int) -> Reserved:
        """Room for `items` under one write lease: per item `Granted`, EXISTS or NO_SPACE. Evicts and moves what it must."""
        arguments.check_call(len(items), owner, lease_ns, self._limits)
        for item in items:
            arguments.check_item(item, self._limits)
        now_ns = self._begin(now_ns)
        allowed = self._leases.room_for(len(items))
        lease: Lease | None = None
        grants: list[Grant] = []
        with self._room(items) as room:
            if allowed:
                room.keep_to_quotas(items, self._quotas.max_bytes)
            for item in items:
                if item.key in self._blocks.committed or item.key in self._blocks.reserved:
                    grants.append(EXISTS)
                    continue
                within = item.near or self._quotas.allow(item.tenant, aligned(item.length))
                offset = room.place(item.length) if allowed and within else None
                if offset is None:
                    self._refuse(within)
                    grants.append(NO_SPACE)
                    continue
                lease = lease or self._leases.open_write(owner, self._deadline(lease_ns, now_ns))
                self._leases.add_write(lease, self._blocks.reserve(item, offset, lease.id))
                grants.append(Granted(offset))
        moves = self._made(room, now_ns)
        if lease is not None:
            self._story.record(now_ns, "reserved", lease.id, tuple(lease.writes or ()))
        return Reserved(lease_id=lease.id if lease else 0, grants=tuple(grants), moves=moves, waiting=room.waiting)

    def commit(
        self,
        lease_id: int,
        keys: Sequence[BlockKey],
        now_ns: int,
        *,
        clean: bool = False,
        passing: bool = False,
        unverified: bool = False,
    ) -> tuple[bool, ...]:
        """Publish blocks written under `lease_id`: True where the block is visible now.

        False where the lease has ended, the key wasn't granted under it, or the block was discarded meanwhile. Saying it
        again while the lease lives is True again. The lease ends with its last block. `clean`: a slower tier has them already;
        `passing`: they came from there for one reading, and are the first to leave until `admit`; `unverified`: their bytes came over
        a wire or off a disk, and nobody has checked them.
        """
        arguments.check_batch(len(keys), self._limits)
        now_ns = self._advance(now_ns)
        lease = self._leases.get(lease_id)
        if lease is None or lease.writes is None:
            return (False,) * len(keys)
        done: list[Resident] = []
        answers: list[bool] = []
        for key in keys:
            block = self._leases.finish_write(lease, key)
            if block is None:
                before = self._blocks.committed.get(key)
                answers.append(before is not None and before.writer == lease_id)
            elif block.state is State.DOOMED:
                self._blocks.drain(block)
                answers.append(False)
            else:
                if unverified:
                    block.unverified = True
                self._publish(block, now_ns)
                block.dirty, block.passing = self._guarded and not (clean or block.near), passing or block.near
                done.append(block)
                answers.append(True)
        self._insert(done, now_ns)
        self._story.record(now_ns, "committed", lease_id, tuple(block.key for block in done))
        if not lease.writes and lease.slab is None:
            self._leases.end(lease)
        return tuple(answers)

    def grant_slab(self, nbytes: int, *, owner: str, lease_ns: int, now_ns: int) -> SlabGrant | None:
        """`nbytes`, rounded up to a multiple of 64, in one piece under a write lease of their own; None when there is no room for them.

        Evicts and moves as `reserve` does. What is not carved goes back when the lease ends.
        """
        arguments.check_call(0, owner, lease_ns, self._limits)
        if nbytes <= 0:
            raise ConfigError(f"a slab has at least one byte, got {nbytes}")
        now_ns = self._begin(now_ns)
        with self._room(()) as room:
            offset = room.place(nbytes) if self._leases.room_for(0) else None
        moves = self._made(room, now_ns)
        if offset is None:
            self._refuse(within=True)
            return None
        lease = self._leases.open_write(owner, self._deadline(lease_ns, now_ns))
        lease.slab = self._blocks.slabs.open(offset, aligned(nbytes))
        return SlabGrant(lease_id=lease.id, offset=offset, nbytes=lease.slab.size, moves=moves)

    def carve(
        self, lease_id: int, items: Sequence[Reserve], now_ns: int, *, verified: bool = True, closed: bool = False
    ) -> tuple[Grant, ...]:
        """Publish blocks that were written to the front of a slab, in order, each from a multiple of 64 on. Per item, in order:

        `Granted`: it is readable at that offset. EXISTS: it is here already, or being written. NO_SPACE: its tenant is at its quota, or no
        further block may be known; all of them when the lease has ended or has no slab. The bytes of every item are cut off
        the slab, whatever the answer; the lease ends with the slab's last byte. `verified`: False when nobody has checked the bytes.
        `closed`: nothing more is taken in, what isn't here is NO_SPACE.
        Raises `ConfigError`, and nothing is done, when the slab has less bytes than these blocks.
        """
        arguments.check_batch(len(items), self._limits)
        for item in items:
            arguments.check_item(item, self._limits)
        now_ns = self._begin(now_ns)
        lease = self._leases.get(lease_id)
        if lease is None or lease.slab is None:
            self._counters["refused"] += len(items)
            return (NO_SPACE,) * len(items)
        wanted = sum(aligned(item.length) for item in items)
        if wanted > lease.slab.size:
            raise ConfigError(f"blocks of {wanted} bytes can't be carved out of the {lease.slab.size} bytes that are left of a slab")
        done: list[Resident] = []
        with self._room(items) as room:
            room.keep_to_quotas(() if closed else items, self._quotas.max_bytes)
            grants = tuple([self._carve(lease, item, room, now_ns, done, verified, closed) for item in items])
        self._made(room, now_ns)
        self._insert(done, now_ns)
        self._story.record(now_ns, "carved", lease_id, tuple(block.key for block in done))
        lease.narrowed()
        if not lease.slab.size:
            self._leases.end(lease)
        return grants

    def moved(self, moves: Sequence[Move]) -> None:
        """The shell has copied what `reserve` or `grant_slab` moved. Must follow at once: nothing else may be asked of the pool between.

        Blocks that moved are told to the board again by it.
        """
        if moves:
            self._blocks.moved()

    # Parts of the above

    def _begin(self, now_ns: int) -> int:
        """Settle what is due, and take back what nobody holds any more, before room is made; the time that counts."""
        blocks = self._blocks
        if blocks.moving:
            raise InvariantError(f"{len(blocks.moving)} blocks were moved by an earlier call, and nobody said that their bytes are there")
        now_ns = self._advance(now_ns)
        if blocks.lingering:
            blocks.drain_lingering(_DRAINED_AT_ONCE)
        return now_ns

    def _room(self, items: Sequence[Reserve]) -> Room:
        return Room(items, self._blocks, self._pens, self._limits, self._evict, self._story)

    def _made(self, room: Room, now_ns: int) -> tuple[Move, ...]:
        """Count what room cost; its moves."""
        if room.evicted:
            self._counters["evicted"] += len(room.evicted)
            self._story.record(now_ns, "evicted", 0, room.evicted)
        if room.moves:
            self._counters["moved_bytes"] += sum(move.size for move in room.moves)
        return tuple(room.moves)

    def _refuse(self, within: bool) -> None:
        self._counters["refused_quota"] += not within
        self._counters["refused"] += 1

    def _insert(self, done: Sequence[Resident], now_ns: int) -> None:
        """Published blocks enter the order of eviction."""
        for block in reversed(done):  # tails first, so that heads are the younger ones
            self._pens.insert(block, now_ns)
            if not block.passing:
                self._regret.wanted(block.key)
        self._counters["inserted"] += len(done)

    def _carve(self, lease: Lease, item: Reserve, room: Room, now_ns: int, done: list[Resident], verified: bool, closed: bool) -> Grant:
        """Cut one item's bytes off a slab, and publish it where that may be."""
        assert lease.slab is not None
        blocks, key, near, size = self._blocks, item.key, item.near, aligned(item.length)
        offset = blocks.slabs.cut(lease.slab, size)
        if key in blocks.committed or key in blocks.reserved:
            blocks.allocator.free(offset)
            return EXISTS
        within = near or self._quotas.allow(item.tenant, size)
        if closed or not within or not room.admits():
            blocks.allocator.free(offset)
            self._refuse(within)
            return NO_SPACE
        block = Resident(item, Location(offset, item.length), size, lease.id)
        block.unverified = not verified
        block.dirty, block.passing = self._guarded and not near, near
        self._date(block, now_ns)
        blocks.carve(block)
        done.append(block)
        return Granted(offset)
