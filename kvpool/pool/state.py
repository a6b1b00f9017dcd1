"""The protocol core of one pool node: which blocks are here, where their bytes lie, and who may touch them.

Theory of operation
-------------------
A pool is an arena of bytes this object never sees, and a table it owns. Callers do three things: *reserve* room, write the
bytes themselves, *commit*; *acquire* what is here, read the bytes themselves, *release*; and *lookup*, which promises nothing.
Every call takes a batch, time is an argument, and nothing here waits, reads a clock or moves a byte.

A block's life, from ABSENT over RESERVED and COMMITTED back to ABSENT, is told in `blocks.py`.

Small writers are granted a *slab* in advance and carve blocks out of it (`writing.py`). Readers on this host may find blocks by a *board*
and hold them there without asking (`announcer.py`, `blocks.py`); `touch` tells what they used.

A *lease* gives a right and an obligation to end: by `release`, by its deadline, or (write) once all its reservations are
finished. A read lease pins the blocks it found; pinned bytes are never handed out again, and never moved. Each call first settles
whatever is due at `now_ns`, so a late commit is refused even if nobody called `tick` in between; `tick` only bounds how long idle
leases, ttls and pins linger. A ttl never ends a gripped block: it goes when its last lease or hard pin ends.

A *pin* keeps a block without reading it (`pins.py`): soft, it is evicted after everything else; hard, not at all until its deadline.

Room is made per item (`room.py`): the batch is atomic per item, not all-or-nothing, since the head of a chain is useful without its
tail. When nothing is left that may go, the answer is NO_SPACE, a value. A tenant with a quota makes room among its own blocks.

A *near* copy is here for readers close by, beside the copies that the pool counts on: it is against no quota, the first to leave, is not
written down, and is told from the others by `lookup`, until this node is to hold the block in its own right (`adopt`).

What a write lease that ran out didn't finish is kept from others for `fence_ns` more (`fences.py`).

With a slower tier below (`guard`), a committed block is *dirty* until it is written down there; a dirty block is not evicted, and a
`reserve` that fails only because of such blocks says `waiting`.

The books (`ledger.py`): free + used + pinned == capacity, always. `check()` recounts everything (`audit.py`).
"""

from collections.abc import Iterable, Sequence

from kvpool.block import BlockKey
from kvpool.pool import arguments
from kvpool.pool.audit import Parts, audit
from kvpool.pool.deadlines import NEVER_NS
from kvpool.pool.resident import Resident
from kvpool.pool.values import Acquired, BlockView, Books, Location, Pin, PinOutcome, Quota
from kvpool.pool.writing import Writing
from kvpool.request.events import Pressure

_DRAINED_BY_TICK = 1024


class PoolState(Writing):
    """Index, leases, pins and books of one node. Single-threaded: the shell serialises calls.

    `capacity_bytes` is rounded down to a multiple of 64. Arguments that break a limit or make no sense raise `ConfigError`
    before anything changes; a broken invariant raises `InvariantError`; everything else is an answer. Time never goes back: an
    earlier `now_ns` than one seen before counts as that one. `watch`: told of blocks that become readable or stop being so.
    `board`: tells readers of this host where blocks lie, so that they needn't ask.
    """

    # Reading

    def acquire(self, keys: Sequence[BlockKey], *, owner: str, lease_ns: int, now_ns: int, sequence: int = 0) -> Acquired:
        """Lease every committed block among `keys` for reading, wherever in the batch it is; a hit counts as a use.

        `sequence`: tokens of the whole prompt it is for, 0 when unknown.
        """
        arguments.check_call(len(keys), owner, lease_ns, self._limits)
        now_ns = self._advance(now_ns)
        found, hits = self._found(keys)
        self._counters["misses"] += len(keys) - len(hits)
        self._use(hits, now_ns, sequence)
        return self._grip(found, hits, keys, owner, self._deadline(lease_ns, now_ns))

    def touch(self, keys: Sequence[BlockKey], now_ns: int, *, sequence: int = 0) -> None:
        """Readers used these blocks without asking, in this order: a use of each that is still committed, without a lease."""
        arguments.check_batch(len(keys), self._limits)
        now_ns = self._advance(now_ns)
        self._use(list(self._known(keys)), now_ns, sequence)

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
                self._drop((block,), "discard")
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

    def doubtful(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Which of `keys` are worth a check: nobody has checked their bytes yet, and they were used more than once."""
        return [block.key for block in self._known(keys) if block.unverified and block.hits > 1]

    def verified(self, checked: Iterable[tuple[BlockKey, Location]]) -> int:
        """These blocks' bytes were found right at these places, under a lease that lives or was released just now; how many they were."""
        count = 0
        for key, place in checked:
            block = self._blocks.committed.get(key)
            if block is not None and block.unverified and block.location == place:
                self._blocks.verified(block)
                count += 1
        return count

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
        """End the leases and pins and remove the ttl blocks that are due at `now_ns`; returns how many leases and blocks.

        Fences that are over, and doomed blocks that nobody holds any more, give their bytes back; of the latter it looks at some thousand.
        """
        before = self._counters["reclaimed_leases"] + self._counters["expired"]
        self._advance(now_ns)
        self._blocks.drain_lingering(_DRAINED_BY_TICK)
        return self._counters["reclaimed_leases"] + self._counters["expired"] - before

    def next_due_ns(self) -> int | None:
        """When the next lease, pin, ttl or fence runs out, None without any: a good time for `tick`. Holds have no such time."""
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
        """Owners of write leases with blocks that are being written; a slab is none."""
        return {lease.owner for lease in self._leases.all() if lease.writes}

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

    def pressure(self) -> Pressure:
        """Bytes that come in before something leaves, and what a token more costs by what left and was written again.

        What a slower tier keeps is not lost, so with one below (`guard`) nothing more is counted.
        """
        return Pressure(self._blocks.ledger.free_bytes, self._regret.price)

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
        audit(Parts(self._blocks, self._leases, self._pins, self._pens, self._story, self._expiries, self._fences, self._keeper.hard_bytes))

    # Parts of the above

    def _use(self, hits: Sequence[Resident], now_ns: int, sequence: int) -> None:
        self._counters["hits"] += len(hits)
        touch = self._pens.touch
        for block in reversed(hits):  # tails first, so that heads are the younger ones
            block.hits += 1
            block.used_ns = now_ns
            touch(block, now_ns, sequence)

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
