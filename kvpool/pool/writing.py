"""The calls of those who write: *reserve* and *commit* per block, or a *slab* in advance and blocks carved out of it.

A slab saves a small writer the way to the pool before each write: it writes one block behind the other into bytes that it has already, and
says once what they are. What is granted then is readable at once; what is not (it is here already, or its tenant is at its quota) gives
its bytes back as a hole. Until it is carved, a slab counts as pinned bytes under a write lease, and belongs to no tenant.
"""

from collections.abc import Iterator, Sequence

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.pool import arguments
from kvpool.pool.allocator import aligned
from kvpool.pool.leases import Lease
from kvpool.pool.resident import Resident, State
from kvpool.pool.room import LeavingSteps, Room
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
        arguments.check_items(items, self._limits)
        now_ns = self._begin(now_ns)
        missing = self._missing(items)
        lease: Lease | None = None
        places: dict[BlockKey, int] = {}
        with self._room(items) as room:
            if self._leases.room_for(len(items)):
                room.keep_to_quotas(items, self._quotas.max_bytes)
                for group in self._groups(missing):
                    found = room.places([item.length for item in group])
                    granted = [(item, offset) for item, offset in zip(group, found, strict=True) if offset is not None]
                    if granted:
                        lease = lease or self._leases.open_write(owner, self._deadline(lease_ns, now_ns))
                        self._leases.add_writes(lease, self._blocks.reserve(granted, lease.id))
                        places.update((item.key, offset) for item, offset in granted)
        grants = self._grants(items, places)
        moves = self._made(room, now_ns)
        if lease is not None:
            self._story.record(now_ns, "reserved", lease.id, tuple(lease.writes or ()))
        return Reserved(lease_id=lease.id if lease else 0, grants=grants, moves=moves, waiting=room.waiting)

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
        found = self._leases.finish_writes(lease, keys)
        reserved = State.RESERVED
        done = [block for block in found if block.state is reserved]
        for block in found if len(done) < len(found) else ():
            if block.state is State.DOOMED:
                self._blocks.drain(block)
        self._dress(done, now_ns, clean=clean, passing=passing, unverified=unverified)
        self._blocks.publish(done)
        self._insert(done, now_ns)
        self._story.record(now_ns, "committed", lease_id, tuple([block.key for block in done]))
        if not lease.writes and lease.slab is None:
            self._leases.end(lease)
        published = map(self._blocks.committed.get, keys)
        return tuple([block is not None and block.writer == lease_id for block in published])

    def grant_slab(self, nbytes: int, *, owner: str, lease_ns: int, now_ns: int) -> SlabGrant | None:
        """`nbytes`, rounded up to a multiple of 64, in one piece under a write lease of their own; None when there is no room for them.

        Evicts and moves as `reserve` does. What is not carved goes back when the lease ends.
        """
        arguments.check_call(0, owner, lease_ns, self._limits)
        if nbytes <= 0:
            raise ConfigError(f"a slab has at least one byte, got {nbytes}")
        now_ns = self._begin(now_ns)
        with self._room(()) as room:
            (offset,) = room.places([nbytes]) if self._leases.room_for(0) else [None]
        moves = self._made(room, now_ns)
        if offset is None:
            self._counters["refused"] += 1
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
        arguments.check_items(items, self._limits)
        now_ns = self._begin(now_ns)
        lease = self._leases.get(lease_id)
        if lease is None or lease.slab is None:
            self._counters["refused"] += len(items)
            return (NO_SPACE,) * len(items)
        sizes = [aligned(item.length) for item in items]
        if sum(sizes) > lease.slab.size:
            raise ConfigError(f"blocks of {sum(sizes)} bytes can't be carved out of the {lease.slab.size} bytes that are left of a slab")
        offsets = self._blocks.slabs.cut(lease.slab, sizes)
        places = dict(zip([item.key for item in reversed(items)], reversed(offsets), strict=True))  # of a key's first item
        done: list[Resident] = []
        with self._room(items) as room:
            room.keep_to_quotas(() if closed else items, self._quotas.max_bytes)
            for group in self._groups([] if closed else self._missing(items)):
                some = group[: room.admits(len(group))]
                blocks = [Resident(item, Location(places[item.key], item.length), aligned(item.length), lease_id) for item in some]
                self._dress(blocks, now_ns, clean=False, passing=False, unverified=not verified)
                self._blocks.carve(blocks)
                done += blocks
        self._blocks.uncarve(set(offsets).difference([block.location.offset for block in done]))
        self._made(room, now_ns)
        self._insert(done, now_ns)
        self._story.record(now_ns, "carved", lease_id, tuple([block.key for block in done]))
        lease.narrowed()
        if not lease.slab.size:
            self._leases.end(lease)
        return self._grants(items, {block.key: block.location.offset for block in done})

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
        return Room(items, self._blocks, self._pens, self._limits, LeavingSteps(self._unlink, self._evict), self._story)

    def _made(self, room: Room, now_ns: int) -> tuple[Move, ...]:
        """Count what room cost; its moves."""
        if room.evicted:
            self._counters["evicted"] += len(room.evicted)
            self._story.record(now_ns, "evicted", 0, room.evicted)
        if room.moves:
            self._counters["moved_bytes"] += sum(move.size for move in room.moves)
        return tuple(room.moves)

    def _missing(self, items: Sequence[Reserve]) -> list[Reserve]:
        """What isn't here yet and nobody is writing; the first item of each key."""
        committed, reserved, missing = self._blocks.committed, self._blocks.reserved, dict[BlockKey, Reserve]()
        for item in items:
            if item.key not in committed and item.key not in reserved:
                missing.setdefault(item.key, item)
        return list(missing.values())

    def _groups(self, items: Sequence[Reserve]) -> Iterator[Sequence[Reserve]]:
        """What may be taken in together, one group after the other: where there are quotas, one item, for it counts for the next one."""
        if items and not self._quotas.max_bytes:
            yield items
            return
        for item in items:
            if item.near or self._quotas.allow(item.tenant, aligned(item.length)):
                yield [item]
            else:
                self._counters["refused_quota"] += 1

    def _grants(self, items: Sequence[Reserve], places: dict[BlockKey, int]) -> tuple[Grant, ...]:
        """What each is told, when those in `places` were taken in by this call: the second item of a key, that it exists."""
        committed, reserved, grants = self._blocks.committed, self._blocks.reserved, list[Grant]()
        for item in items:
            offset = places.pop(item.key, None)
            if offset is not None:
                grants.append(Granted(offset))
            else:
                grants.append(EXISTS if item.key in committed or item.key in reserved else NO_SPACE)
        self._counters["refused"] += grants.count(NO_SPACE)
        return tuple(grants)

    def _dress(self, blocks: Sequence[Resident], now_ns: int, *, clean: bool, passing: bool, unverified: bool) -> None:
        """Blocks are about to be committed: what is known of them then, and their ttls."""
        guarded = self._guarded and not clean
        for block in blocks:
            block.committed_ns = block.used_ns = now_ns
            block.unverified = unverified
            block.dirty = guarded and not block.near
            block.passing = passing or block.near
            if block.ttl_ns:
                block.expires_ns = now_ns + block.ttl_ns
                self._expiries.set(block.key, block.expires_ns)
                self._due_ns = min(self._due_ns, block.expires_ns)

    def _insert(self, done: Sequence[Resident], now_ns: int) -> None:
        """Published blocks enter the order of eviction."""
        self._pens.insert(done, now_ns)
        for block in done:
            if not block.passing:
                self._regret.wanted(block.key)
        self._counters["inserted"] += len(done)
