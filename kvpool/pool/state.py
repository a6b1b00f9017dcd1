"""The protocol core of one pool node: which blocks are here, where their bytes lie, and who may touch them.

Theory of operation
-------------------
A pool is an arena of bytes this object never sees, and a table it owns. Callers do three things: *reserve* room, write the
bytes themselves, *commit*; *acquire* what is here, read the bytes themselves, *release*; and *lookup*, which promises nothing.
Every call takes a batch, time is an argument, and nothing here waits, reads a clock or moves a byte.

A block's life, from ABSENT over RESERVED and COMMITTED back to ABSENT, is told in `blocks.py`.

A *lease* gives a right and an obligation to end: by `release`, by its deadline, or (write) once all its reservations are
finished. A read lease pins the blocks it found; pinned bytes are never handed out again, and never moved. Each call first settles
whatever is due at `now_ns`, so a late commit is refused even if nobody called `tick` in between; `tick` only bounds how long idle
leases, ttls and pins linger. A ttl never ends a gripped block: it goes when its last lease or hard pin ends.

A *pin* keeps a block without reading it (`pins.py`): soft, it is evicted after everything else; hard, not at all until its deadline.

Room is made per item (`room.py`): the batch is atomic per item, not all-or-nothing, since the head of a chain is useful without its
tail. When nothing is left that may go, the answer is NO_SPACE, a value. A tenant with a quota makes room among its own blocks.

A *near* copy is here for readers close by, beside the copies that the pool counts on: it is against no quota, the first to leave, is not
written down, and is told from the others by `lookup`, until this node is to hold the block in its own right (`adopt`).

With a slower tier below (`guard`), a committed block is *dirty* until it is written down there; a dirty block is not evicted, and a
`reserve` that fails only because of such blocks says `waiting`.

The books (`ledger.py`): free + used + pinned == capacity, always. `check()` recounts everything (`audit.py`).
"""

from collections.abc import Iterable, Iterator, Sequence

from kvpool.block import BlockKey
from kvpool.policy.eviction import EvictionPolicy
from kvpool.pool import arguments
from kvpool.pool.allocator import aligned
from kvpool.pool.audit import Parts, audit
from kvpool.pool.blocks import Blocks, Watcher
from kvpool.pool.deadlines import NEVER_NS, Deadlines
from kvpool.pool.keeper import Keeper
from kvpool.pool.leases import Lease, Leases
from kvpool.pool.limits import PoolLimits
from kvpool.pool.pens import Pens
from kvpool.pool.quotas import Quotas
from kvpool.pool.resident import Resident, State
from kvpool.pool.room import Room
from kvpool.pool.story import Story
from kvpool.pool.values import (
    EXISTS,
    NO_SPACE,
    Acquired,
    BlockView,
    Books,
    Grant,
    Granted,
    Location,
    Pin,
    PinOutcome,
    Quota,
    Reserve,
    Reserved,
)

_COUNTERS = (
    "hits", "misses", "inserted", "evicted", "expired", "discarded", "refused", "refused_quota", "reclaimed_leases", "moved_bytes",
)  # fmt: skip


class PoolState:
    """Index, leases, pins and books of one node. Single-threaded: the shell serialises calls.

    `capacity_bytes` is rounded down to a multiple of 64. Arguments that break a limit or make no sense raise `ConfigError`
    before anything changes; a broken invariant raises `InvariantError`; everything else is an answer. Time never goes back: an
    earlier `now_ns` than one seen before counts as that one. `watch`: told of each block that becomes readable or stops being so.
    """

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy, limits: PoolLimits | None = None, watch: Watcher | None = None) -> None:
        self._limits = limits or PoolLimits()
        self._story = Story(self._limits.max_story_keys)
        self._blocks = Blocks(capacity_bytes, self._story, watch)
        self._pens = Pens(policy)
        self._leases = Leases(self._limits)
        self._keeper = Keeper(self._blocks, self._pens, self._limits)
        self._pins = self._keeper.pins
        self._quotas = Quotas(self._blocks.tenant_bytes, self._limits)
        self._expiries: Deadlines[bytes] = Deadlines()
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._guarded = False
        self._now_ns = 0
        self._due_ns = NEVER_NS  # nothing is due before

    @property
    def limits(self) -> PoolLimits:
        """The bounds it was made with."""
        return self._limits

    # Writing

    def reserve(self, items: Sequence[Reserve], *, owner: str, lease_ns: int, now_ns: int) -> Reserved:
        """Room for `items` under one write lease: per item `Granted`, EXISTS or NO_SPACE. Evicts and moves what it must."""
        arguments.check_call(len(items), owner, lease_ns, self._limits)
        for item in items:
            arguments.check_item(item, self._limits)
        now_ns = self._advance(now_ns)
        allowed = self._leases.room_for(len(items))
        lease: Lease | None = None
        grants: list[Grant] = []
        with Room(items, self._blocks, self._pens, self._limits, self._evict, self._story) as room:
            if allowed:
                room.keep_to_quotas(items, self._quotas.max_bytes)
            for item in items:
                if item.key in self._blocks.committed or item.key in self._blocks.reserved:
                    grants.append(EXISTS)
                    continue
                within = item.near or self._quotas.allow(item.tenant, aligned(item.length))
                offset = room.place(item.length) if allowed and within else None
                if offset is None:
                    self._counters["refused_quota"] += not within
                    self._counters["refused"] += 1
                    grants.append(NO_SPACE)
                    continue
                lease = lease or self._leases.open_write(owner, self._deadline(lease_ns, now_ns))
                self._leases.add_write(lease, self._blocks.reserve(item, offset, lease.id))
                grants.append(Granted(offset))
        if room.evicted:
            self._counters["evicted"] += len(room.evicted)
            self._story.record(now_ns, "evicted", 0, room.evicted)
        self._counters["moved_bytes"] += sum(move.size for move in room.moves)
        if lease is not None:
            self._story.record(now_ns, "reserved", lease.id, tuple(lease.writes or ()))
        return Reserved(lease_id=lease.id if lease else 0, grants=tuple(grants), moves=tuple(room.moves), waiting=room.waiting)

    def commit(
        self, lease_id: int, keys: Sequence[BlockKey], now_ns: int, *, clean: bool = False, passing: bool = False
    ) -> tuple[bool, ...]:
        """Publish blocks written under `lease_id`: True where the block is visible now.

        False where the lease has ended, the key wasn't granted under it, or the block was discarded meanwhile. Saying it
        again while the lease lives is True again. The lease ends with its last block. `clean`: a slower tier has them already;
        `passing`: they came from there for one reading, and are the first to leave until `admit`.
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
                self._publish(block, now_ns)
                block.dirty, block.passing = self._guarded and not (clean or block.near), passing or block.near
                done.append(block)
                answers.append(True)
        for block in reversed(done):  # tails first, so that heads are the younger ones
            self._pens.insert(block, now_ns)
        self._counters["inserted"] += len(done)
        self._story.record(now_ns, "committed", lease_id, tuple(block.key for block in done))
        if not lease.writes:
            self._leases.end(lease)
        return tuple(answers)

    # Reading

    def acquire(self, keys: Sequence[BlockKey], *, owner: str, lease_ns: int, now_ns: int, sequence: int = 0) -> Acquired:
        """Lease every committed block among `keys` for reading, wherever in the batch it is; a hit counts as a use.

        `sequence`: tokens of the whole prompt it is for, 0 when unknown.
        """
        arguments.check_call(len(keys), owner, lease_ns, self._limits)
        now_ns = self._advance(now_ns)
        found, hits = self._found(keys)
        self._counters["hits"] += len(hits)
        self._counters["misses"] += len(keys) - len(hits)
        touch = self._pens.touch
        for block in reversed(hits):  # tails first, so that heads are the younger ones
            block.hits += 1
            block.used_ns = now_ns
            touch(block, now_ns, sequence)
        return self._grip(found, hits, keys, owner, self._deadline(lease_ns, now_ns))

    def hold(self, keys: Sequence[BlockKey], *, owner: str, lease_ns: int, now_ns: int) -> Acquired:
        """As `acquire`, but no use of the blocks: counts no hit and changes no order. For the node's own work."""
        arguments.check_call(len(keys), owner, lease_ns, self._limits)
        now_ns = self._advance(now_ns)
        found, hits = self._found(keys)
        return self._grip(found, hits, keys, owner, self._deadline(lease_ns, now_ns))

    def lookup(self, keys: Sequence[BlockKey], now_ns: int) -> bytes:
        """One byte a key: 1 when it is committed, `NEAR` when only as a near copy. A probe: no lease, no use, no promise."""
        arguments.check_batch(len(keys), self._limits)
        self._advance(now_ns)
        return self._blocks.present(keys)

    # Leases

    def renew(self, lease_id: int, lease_ns: int, now_ns: int) -> bool:
        """Extend a lease to `lease_ns` from now (never shorten it); False when it has ended."""
        arguments.check_duration(lease_ns)
        now_ns = self._advance(now_ns)
        if self._leases.get(lease_id) is None:
            return False
        self._leases.extend(lease_id, self._deadline(lease_ns, now_ns))
        return True

    def release(self, lease_id: int, now_ns: int) -> bool:
        """End a lease of either kind; uncommitted reservations give their bytes back. False when it had ended already."""
        self._advance(now_ns)
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        self._end(lease, "released")
        return True

    def leased_ranges(self, lease_id: int, ranges: Sequence[tuple[int, int]], *, write: bool | None = None) -> bool:
        """Whether every (offset, length) lies inside bytes that this live lease may touch: read its hits, or write its
        reservations that aren't committed yet. `write` asks for one of the two rights; None takes either. A range may span
        adjacent blocks. No time is looked at: `tick` first.
        """
        arguments.check_batch(len(ranges), self._limits)
        lease = self._leases.get(lease_id)
        if lease is None or (write is not None and write != (lease.writes is not None)):
            return False
        return lease.covers(ranges)

    # Keeping and dropping

    def discard(self, key: BlockKey) -> bool:
        """Unlink a block that is corrupt or unwanted, its pins too; True when there was one. Bytes under a lease wait for its end."""
        block = self._blocks.committed.get(key)
        if block is None:
            block = self._blocks.reserved.get(key)
            if block is None:
                return False
            self._doom(block)
        else:
            self._unlink(block)
            if block.grips:
                self._doom(block)
            else:
                self._blocks.drop(block, "discard")
                self._story.record(self._now_ns, "discarded", 0, (key,))
        self._counters["discarded"] += 1
        return True

    def pin(self, keys: Sequence[BlockKey], *, owner: str, hard: bool, duration_ns: int, now_ns: int) -> tuple[PinOutcome, ...]:
        """Keep committed blocks for `duration_ns` from now; a second pin of the same owner replaces the first. REFUSED at a limit."""
        arguments.check_call(len(keys), owner, duration_ns, self._limits)
        now_ns = self._advance(now_ns)
        pin = Pin(owner, hard, now_ns + duration_ns)
        self._due_ns = min(self._due_ns, pin.deadline_ns)
        answers: list[PinOutcome] = []
        for key in keys:
            block = self._blocks.committed.get(key)
            answers.append(PinOutcome.ABSENT if block is None else self._keeper.pin(block, pin))
            if block is not None:
                self._repin(block)
        return tuple(answers)

    def unpin(self, keys: Sequence[BlockKey], *, owner: str, now_ns: int) -> int:
        """End this owner's pins of `keys`; how many there were."""
        arguments.check_batch(len(keys), self._limits)
        self._advance(now_ns)
        count = 0
        for key in keys:
            if self._pins.drop(key, owner) is not None:
                count += 1
                self._repin(self._blocks.committed[key])
        return count

    def set_quota(self, tenant: str, max_bytes: int | None) -> None:
        """What the blocks of `tenant` may take from now on; None lifts the limit. Blocks above it leave when the tenant writes again."""
        self._quotas.set(tenant, max_bytes)

    def quotas(self) -> dict[str, Quota]:
        """Tenants that have blocks here or a quota, by name."""
        return self._quotas.all()

    # The slower tier

    def guard(self, on: bool) -> None:
        """Whether blocks committed from now on are dirty, kept until `mark_clean`. Off makes every block evictable as it is."""
        self._guarded = on
        if not on:
            for block in self._blocks.committed.values():
                block.dirty = False

    def mark(self, keys: Iterable[BlockKey], *, dirty: bool) -> None:
        """Committed blocks among `keys` are (not) written down below. Without `guard` nothing gets dirty."""
        for block in self._known(keys):
            block.dirty = dirty and self._guarded and not block.near

    def admit(self, keys: Iterable[BlockKey], now_ns: int) -> None:
        """Passing blocks among `keys` have come back: they stay as long as the policy says. Near copies stay what they are."""
        self._advance(now_ns)
        for block in self._known(keys):
            self._pens.admit(block, self._now_ns)

    def adopt(self, keys: Iterable[BlockKey], now_ns: int) -> list[BlockKey]:
        """Near copies among `keys` are blocks like any other from now on; which these were."""
        self._advance(now_ns)
        adopted = [block for block in self._known(keys) if block.near]
        for block in adopted:
            self._blocks.adopt(block)
            block.dirty = self._guarded
            self._pens.admit(block, self._now_ns)
        return [block.key for block in adopted]

    def coldest(self, nbytes: int, now_ns: int) -> list[BlockKey]:
        """Blocks that would leave next to make room for `nbytes`, the first first; their chains upwards included, clean or dirty."""
        self._advance(now_ns)
        return self._pens.coldest(nbytes, self._blocks.committed)

    # Time

    def tick(self, now_ns: int) -> int:
        """End the leases and pins and remove the ttl blocks that are due at `now_ns`; returns how many leases and blocks."""
        before = self._counters["reclaimed_leases"] + self._counters["expired"]
        self._advance(now_ns)
        return self._counters["reclaimed_leases"] + self._counters["expired"] - before

    def next_due_ns(self) -> int | None:
        """When the next lease, pin or ttl runs out, None without any: a good time for `tick`."""
        due_ns = self._first_due_ns()
        return None if due_ns == NEVER_NS else due_ns

    # Looking

    def locate(self, key: BlockKey) -> Location | None:
        """Where a committed block lies, for the owner's own checks: no lease, no touch."""
        block = self._blocks.committed.get(key)
        return None if block is None else block.location

    def link(self, key: BlockKey) -> tuple[BlockKey | None, int, bool] | None:
        """Parent, depth, and whether it is a near copy, of a committed block: what a walk along chains needs."""
        block = self._blocks.committed.get(key)
        return None if block is None else (block.parent, block.depth, block.near)

    def view(self, key: BlockKey, *, holders: bool = False) -> BlockView | None:
        """All that is known of a committed block; with `holders` of its leases too (their search takes a look at every lease)."""
        block = self._blocks.committed.get(key)
        return None if block is None else block.view(self._pins.of(key), self._leases.holders(block) if holders else ())

    def writing(self, key: BlockKey) -> bool:
        """Whether somebody is writing the block."""
        return key in self._blocks.reserved

    def writers(self) -> set[str]:
        """Owners of live write leases."""
        return {lease.owner for lease in self._leases.all() if lease.writes is not None}

    def due(self, now_ns: int) -> tuple[int, int, int]:
        """What `tick` would end at `now_ns`: leases, blocks whose ttl is over, the bytes these take. Looks at all."""
        over = [self._blocks.committed[BlockKey(key)] for key in self._expiries.due(now_ns)]
        free = [block.size for block in over if not block.grips]
        return self._leases.overdue(now_ns), len(free), sum(free)

    def committed_keys(self) -> list[BlockKey]:
        """Every committed key, in order of commit."""
        return list(self._blocks.committed)

    def books(self) -> Books:
        """Bytes and counts now."""
        leases = self._leases
        return self._blocks.books(read_leases=len(leases) - leases.write_count, write_leases=leases.write_count)

    def counters(self) -> dict[str, int]:
        """Totals since the start. Blocks: hits, misses (of acquire), inserted, evicted, expired, discarded, refused (NO_SPACE and hits
        turned away at a lease limit), refused_quota (of these, by a tenant's quota). Leases: reclaimed_leases (ended by their
        deadline). Bytes: moved_bytes, copied inside the arena to make room.
        """
        return dict(self._counters)

    def story(self, key: BlockKey) -> list[str]:
        """What is remembered of a key's past, oldest first, as lines of text."""
        return self._story.of(key)

    def check(self) -> None:
        """Recount everything; raises `InvariantError` with the key's story when something disagrees. O(n log n)."""
        audit(Parts(self._blocks, self._leases, self._pins, self._pens, self._story, self._expiries, self._keeper.hard_bytes))

    # Steps

    def _known(self, keys: Iterable[BlockKey]) -> Iterator[Resident]:
        return filter(None, map(self._blocks.committed.get, keys))

    def _found(self, keys: Sequence[BlockKey]) -> tuple[list[Location | None], list[Resident]]:
        """Where the keys lie, and the blocks among them; none of them when the lease table has no room."""
        found: list[Location | None] = []
        hits: list[Resident] = []
        for block in map(self._blocks.committed.get, keys):
            if block is None:
                found.append(None)
            else:
                found.append(block.location)
                hits.append(block)
        if hits and not self._leases.room_for(len(hits)):
            self._counters["refused"] += len(hits)
            return [None] * len(keys), []
        return found, hits

    def _grip(
        self, found: Sequence[Location | None], hits: list[Resident], keys: Sequence[BlockKey], owner: str, deadline_ns: int
    ) -> Acquired:
        if not hits:
            return Acquired(lease_id=0, found=tuple(found))
        grip = self._blocks.grip
        for block in hits:
            grip(block)
        lease = self._leases.open_read(owner, hits, deadline_ns)
        self._story.record(self._now_ns, "acquired", lease.id, tuple(keys))
        return Acquired(lease_id=lease.id, found=tuple(found))

    def _publish(self, block: Resident, now_ns: int) -> None:
        self._blocks.publish(block)
        block.committed_ns = block.used_ns = now_ns
        if block.ttl_ns:
            block.expires_ns = now_ns + block.ttl_ns
            self._expiries.set(block.key, block.expires_ns)
            self._due_ns = min(self._due_ns, block.expires_ns)

    def _unlink(self, block: Resident) -> None:
        """A committed block is about to leave the index: out of the order of eviction, without pins, without a ttl."""
        self._pens.remove(block)
        if block.ttl_ns:
            self._expiries.drop(block.key)
        self._keeper.forget(block)

    def _evict(self, block: Resident) -> None:
        self._unlink(block)
        self._blocks.drop(block, "evict")

    def _expire(self, block: Resident) -> None:
        self._unlink(block)
        self._blocks.drop(block, "expire")
        self._story.record(self._now_ns, "expired", 0, (block.key,))
        self._counters["expired"] += 1

    def _doom(self, block: Resident) -> None:
        self._blocks.doom(block)
        self._story.record(self._now_ns, "doomed", 0, (block.key,))

    def _repin(self, block: Resident) -> None:
        """Pins of the block came or went."""
        if self._keeper.settle(block, self._now_ns) and block.expires_ns <= self._now_ns:
            self._expire(block)

    # Ends

    def _advance(self, now_ns: int) -> int:
        """Settle everything that is due; the time that counts."""
        now_ns = self._now_ns = max(now_ns, self._now_ns)
        if now_ns < self._due_ns:
            return now_ns
        while (lease := self._leases.due(now_ns)) is not None:
            self._counters["reclaimed_leases"] += 1
            self._end(lease, "lease ran out")
        while (due := self._pins.pop_due(now_ns)) is not None:
            self._repin(self._blocks.committed[due[0]])
        while (key := self._expiries.pop_due(now_ns)) is not None:
            block = self._blocks.committed[BlockKey(key)]
            if not block.grips:
                self._expire(block)
        self._due_ns = self._first_due_ns()
        return now_ns

    def _first_due_ns(self) -> int:
        return min(self._leases.first_deadline_ns(), self._pins.first_deadline_ns(), self._expiries.first_ns())

    def _end(self, lease: Lease, why: str) -> None:
        self._leases.end(lease)
        if lease.writes is not None:
            for block in lease.writes.values():
                if block.state is State.DOOMED:
                    self._blocks.drain(block)
                else:
                    self._blocks.abandon(block)
            self._story.record(self._now_ns, f"{why} before its commit", lease.id, tuple(lease.writes))
            return
        loosen = self._blocks.loosen
        over = [block for block in lease.reads if loosen(block) and block.expires_ns <= self._now_ns]
        for block in over:
            self._expire(block)
        self._story.record(self._now_ns, why, lease.id, [block.key for block in lease.reads])

    def _deadline(self, lease_ns: int, now_ns: int) -> int:
        deadline_ns = now_ns + min(lease_ns, self._limits.max_lease_ns)
        self._due_ns = min(self._due_ns, deadline_ns)
        return deadline_ns
