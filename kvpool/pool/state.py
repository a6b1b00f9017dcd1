"""The protocol core of one pool node: which blocks are here, where their bytes lie, and who may touch them.

Theory of operation
-------------------
A pool is an arena of bytes this object never sees, and a table it owns. Callers do three things: *reserve* room, write the
bytes themselves, *commit*; *acquire* what is here, read the bytes themselves, *release*; and *lookup*, which promises nothing.
Every call takes a batch, time is an argument, and nothing here waits, reads a clock or moves a byte.

A block's life is the table `TRANSITIONS` below:

* ABSENT → RESERVED, `reserve`. The block has bytes that only its writer knows; readers don't see it. A second writer of the same
  key is told EXISTS: a block is a pure function of its key, so one copy in flight is enough.
* RESERVED → COMMITTED, `commit` by the write lease that reserved it. From now on it is immutable and visible.
* RESERVED → ABSENT, `abandon`: the write lease was released or ran out first, and the bytes go back at once. A writer that
  comes back from the dead may still scribble over bytes that are somebody else's by now. That is harmless: every frame carries
  its key and a checksum, every reader checks them, and a failed check is a miss.
* COMMITTED → ABSENT, `evict` (room was needed and the policy named it), `expire` (its ttl ran out) or `discard`; only while no
  lease holds it.
* COMMITTED or RESERVED → DOOMED, `doom`: discarded while leased. It is unlinked at once, so nobody new finds it and its
  key can be reserved afresh, but its bytes stay until the last lease on it ends.
* DOOMED → ABSENT, `drain`: that lease ended.

A *lease* gives a right and an obligation to end: by `release`, by its deadline, or (write) once all its reservations are
finished. A read lease pins the blocks it found; pinned bytes are never handed out again. Each call first settles whatever is
due at `now_ns`, so a late commit is refused even if nobody called `tick` in between; `tick` only bounds how long idle
leases and ttls linger. A ttl never ends a leased block: it goes when its last lease ends.

Room is made by the eviction policy, per block: the batch is atomic per item, not all-or-nothing, since the head of a chain is
useful without its tail. What leases hold, what is reserved, and the blocks and parents named by the same call are never
evicted; when nothing else is left the answer is NO_SPACE, a value. Nothing is evicted for an item larger than free + used, and
an item that still doesn't fit after `_PATIENCE` evictions goes on only if some gap between pinned extents could take it, so a
large block can't empty a pool whose leases leave no room for it.

The books (`ledger.py`): free + used + pinned == capacity, always. `check()` recounts everything (`audit.py`).
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import count
from typing import Final

from kvpool.block import KEY_BYTES, BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.eviction import Arrival, EvictionPolicy
from kvpool.pool.allocator import Allocator, aligned
from kvpool.pool.audit import Parts, audit
from kvpool.pool.deadlines import NEVER_NS, Deadlines
from kvpool.pool.leases import Lease, Leases
from kvpool.pool.ledger import Ledger
from kvpool.pool.limits import PoolLimits
from kvpool.pool.resident import Resident, State
from kvpool.pool.story import Story
from kvpool.pool.values import EXISTS, NO_SPACE, Acquired, Books, Grant, Granted, Location, Reserve, Reserved

TRANSITIONS: Final[dict[tuple[State, str], State]] = {
    (State.ABSENT, "reserve"): State.RESERVED,
    (State.RESERVED, "commit"): State.COMMITTED,
    (State.RESERVED, "abandon"): State.ABSENT,
    (State.RESERVED, "doom"): State.DOOMED,
    (State.COMMITTED, "evict"): State.ABSENT,
    (State.COMMITTED, "expire"): State.ABSENT,
    (State.COMMITTED, "discard"): State.ABSENT,
    (State.COMMITTED, "doom"): State.DOOMED,
    (State.DOOMED, "drain"): State.ABSENT,
}
"""(state, event): next state. Whatever isn't here can't happen."""

_PATIENCE = 16
_COUNTERS = ("hits", "misses", "inserted", "evicted", "expired", "discarded", "refused", "reclaimed_leases")


class PoolState:
    """Index, leases and books of one node. Single-threaded: the shell serialises calls.

    `capacity_bytes` is rounded down to a multiple of 64. Arguments that break a limit or make no sense raise `ConfigError`
    before anything changes; a broken invariant raises `InvariantError`; everything else is an answer.
    """

    def __init__(self, capacity_bytes: int, policy: EvictionPolicy, limits: PoolLimits | None = None) -> None:
        self._limits = limits or PoolLimits()
        self._policy = policy
        self._allocator = Allocator(capacity_bytes)
        self._ledger = Ledger(self._allocator.capacity_bytes)
        self._leases = Leases(self._limits)
        self._story = Story(self._limits.max_story_keys)
        self._expiries: Deadlines[bytes] = Deadlines()
        self._committed: dict[BlockKey, Resident] = {}
        self._reserved: dict[BlockKey, Resident] = {}
        self._doomed: dict[int, Resident] = {}  # by offset
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._ceiling: int | None = None  # during one reserve: no item above it can fit; None: not computed
        self._evicted: list[BlockKey] = []  # during one reserve
        self._now_ns = 0
        self._due_ns = NEVER_NS  # nothing is due before

    def reserve(self, items: Sequence[Reserve], *, owner: str, lease_ns: int, now_ns: int) -> Reserved:
        """Room for `items` under one write lease: per item `Granted`, EXISTS or NO_SPACE. Evicts what it must."""
        self._check_call(len(items), owner, lease_ns)
        for item in items:
            _check_item(item)
        self._advance(now_ns)
        room = self._leases.room_for(len(items))
        self._ceiling, self._evicted = None, []
        lease: Lease | None = None
        grants: list[Grant] = []
        with closing(self._evictable(items)) as victims:
            for item in items:
                if item.key in self._committed or item.key in self._reserved:
                    grants.append(EXISTS)
                    continue
                offset = self._place(item.length, victims) if room else None
                if offset is None:
                    self._counters["refused"] += 1
                    grants.append(NO_SPACE)
                    continue
                lease = lease or self._leases.open_write(owner, self._deadline(lease_ns, now_ns))
                self._enter(item, offset, lease)
                grants.append(Granted(offset))
        if self._evicted:
            self._counters["evicted"] += len(self._evicted)
            self._story.record(now_ns, "evicted", 0, self._evicted)
        if lease is None:
            return Reserved(lease_id=0, grants=tuple(grants))
        self._story.record(now_ns, "reserved", lease.id, tuple(lease.writes or ()))
        return Reserved(lease_id=lease.id, grants=tuple(grants))

    def commit(self, lease_id: int, keys: Sequence[BlockKey], now_ns: int) -> tuple[bool, ...]:
        """Publish blocks written under `lease_id`: True where the block is visible now.

        False where the lease has ended, the key wasn't granted under it, or the block was discarded meanwhile. Saying it
        again while the lease lives is True again. The lease ends with its last block.
        """
        self._check_batch(len(keys))
        self._advance(now_ns)
        lease = self._leases.get(lease_id)
        if lease is None or lease.writes is None:
            return (False,) * len(keys)
        done: list[Resident] = []
        answers: list[bool] = []
        for key in keys:
            block = self._leases.finish_write(lease, key)
            if block is None:
                before = self._committed.get(key)
                answers.append(before is not None and before.writer == lease_id)
            elif block.state is State.DOOMED:
                self._drain(block)
                answers.append(False)
            else:
                self._publish(block, now_ns)
                done.append(block)
                answers.append(True)
        for block in reversed(done):  # tails first, so that heads are the younger ones
            self._policy.inserted(Arrival(block.key, block.parent, block.depth, block.location.length), now_ns)
        self._counters["inserted"] += len(done)
        self._story.record(now_ns, "committed", lease_id, tuple(block.key for block in done))
        if not lease.writes:
            self._leases.end(lease)
        return tuple(answers)

    def acquire(self, keys: Sequence[BlockKey], *, owner: str, lease_ns: int, now_ns: int) -> Acquired:
        """Lease every committed block among `keys` for reading, wherever in the batch it is; a hit counts as a use."""
        self._check_call(len(keys), owner, lease_ns)
        self._advance(now_ns)
        found: list[Location | None] = []
        hits: list[Resident] = []
        for block in map(self._committed.get, keys):
            if block is None:
                found.append(None)
            else:
                found.append(block.location)
                hits.append(block)
        if hits and not self._leases.room_for(len(hits)):
            self._counters["refused"] += len(hits)
            found, hits = [None] * len(keys), []
        self._counters["hits"] += len(hits)
        self._counters["misses"] += len(keys) - len(hits)
        if not hits:
            return Acquired(lease_id=0, found=tuple(found))
        pinned = 0
        touched = self._policy.touched
        for block in reversed(hits):  # tails first, so that heads are the younger ones
            if block.readers == 0:
                pinned += block.size
            block.readers += 1
            touched(block.key, now_ns)
        self._ledger.pin(pinned)
        lease = self._leases.open_read(owner, hits, self._deadline(lease_ns, now_ns))
        self._story.record(now_ns, "acquired", lease.id, tuple(keys))
        return Acquired(lease_id=lease.id, found=tuple(found))

    def lookup(self, keys: Sequence[BlockKey], now_ns: int) -> bytes:
        """One byte a key: 1 when it is committed. A probe: leases nothing, is no use of the block, promises nothing."""
        self._check_batch(len(keys))
        self._advance(now_ns)
        return bytes(map(self._committed.__contains__, keys))

    def renew(self, lease_id: int, lease_ns: int, now_ns: int) -> bool:
        """Extend a lease to `lease_ns` from now (never shorten it); False when it has ended."""
        self._check_lease_ns(lease_ns)
        self._advance(now_ns)
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

    def discard(self, key: BlockKey) -> bool:
        """Unlink a block that is corrupt or unwanted; True when there was one. Bytes under a lease wait for its end."""
        block = self._committed.get(key)
        if block is None:
            block = self._reserved.pop(key, None)
            if block is None:
                return False
            self._doom(block)
        elif block.readers:
            self._unlink(block)
            self._doom(block)
        else:
            self._unlink(block)
            self._drop_used(block, "discard")
            self._story.record(self._now_ns, "discarded", 0, (key,))
        self._counters["discarded"] += 1
        return True

    def locate(self, key: BlockKey) -> Location | None:
        """Where a committed block lies, for the owner's own checks: no lease, no touch."""
        block = self._committed.get(key)
        return None if block is None else block.location

    def leased_ranges(self, lease_id: int, ranges: Sequence[tuple[int, int]], *, write: bool | None = None) -> bool:
        """Whether every (offset, length) lies inside bytes that this live lease may touch: read its hits, or write its
        reservations that aren't committed yet. `write` asks for one of the two rights; None takes either. A range may span
        adjacent blocks. No time is looked at: `tick` first.
        """
        self._check_batch(len(ranges))
        lease = self._leases.get(lease_id)
        if lease is None or (write is not None and write != (lease.writes is not None)):
            return False
        return lease.covers(ranges)

    def tick(self, now_ns: int) -> int:
        """End the leases and remove the ttl blocks that are due at `now_ns`; returns how many of both."""
        before = self._counters["reclaimed_leases"] + self._counters["expired"]
        self._advance(now_ns)
        return self._counters["reclaimed_leases"] + self._counters["expired"] - before

    def next_due_ns(self) -> int | None:
        """When the next lease or ttl runs out, None without any: a good time for `tick`."""
        due_ns = min(self._leases.first_deadline_ns(), self._expiries.first_ns())
        return None if due_ns == NEVER_NS else due_ns

    def books(self) -> Books:
        """Bytes and counts now."""
        ledger, leases = self._ledger, self._leases
        return Books(
            capacity=ledger.capacity_bytes,
            free=ledger.free_bytes,
            used=ledger.used_bytes,
            pinned=ledger.pinned_bytes,
            blocks=len(self._committed),
            read_leases=len(leases) - leases.write_count,
            write_leases=leases.write_count,
        )

    def counters(self) -> dict[str, int]:
        """Totals since the start. Blocks: hits, misses (of acquire), inserted, evicted, expired, discarded, refused
        (NO_SPACE and hits turned away at a lease limit). Leases: reclaimed_leases (ended by their deadline).
        """
        return dict(self._counters)

    def story(self, key: BlockKey) -> list[str]:
        """What is remembered of a key's past, oldest first, as lines of text."""
        return self._story.of(key)

    def check(self) -> None:
        """Recount everything; raises `InvariantError` with the key's story when something disagrees. O(n log n)."""
        audit(
            Parts(
                allocator=self._allocator,
                ledger=self._ledger,
                leases=self._leases,
                policy=self._policy,
                story=self._story,
                expiries=self._expiries,
                committed=self._committed,
                reserved=self._reserved,
                doomed=self._doomed,
            )
        )

    # Making room

    def _place(self, length: int, victims: Iterator[Resident]) -> int | None:
        """An offset for `length` bytes, evicting `victims` until it fits."""
        if aligned(length) > self._ledger.free_bytes + self._ledger.used_bytes:
            return None
        for evicted in count():
            if len(self._committed) + len(self._reserved) + len(self._doomed) < self._limits.max_blocks:
                offset = self._allocator.allocate(length)
                if offset is not None:
                    return offset
            if evicted == _PATIENCE and aligned(length) > self._largest_gap():
                return None
            victim = next(victims, None)
            if victim is None:
                return None
            self._unlink(victim)
            self._drop_used(victim, "evict")
            self._evicted.append(victim.key)
        raise AssertionError("unreachable")

    def _largest_gap(self) -> int:
        """Bytes between pinned extents at most, if all else left. It can only shrink within a call, so once a call is enough."""
        if self._ceiling is None:
            pinned = [block for block in self._committed.values() if block.readers]
            pinned += [*self._reserved.values(), *self._doomed.values()]
            self._ceiling = self._allocator.largest_between([block.location.offset for block in pinned])
        return self._ceiling

    def _evictable(self, items: Sequence[Reserve]) -> Generator[Resident, None, None]:
        """Blocks that may go to make room for `items`, in the policy's order. Does nothing until first asked."""
        named = {item.key for item in items}
        named.update(item.parent for item in items if item.parent is not None)
        with closing(self._policy.victims()) as candidates:
            for key in candidates:
                block = self._committed.get(key)
                if block is None:
                    raise self._story.error("offered for eviction, but not committed", key)
                if not block.readers and key not in named:
                    yield block

    # Steps of a block's life

    def _enter(self, item: Reserve, offset: int, lease: Lease) -> None:
        size = aligned(item.length)
        block = Resident(item.key, item.parent, item.depth, Location(offset, item.length), size, item.ttl_ns, lease.id)
        self._move(block, "reserve")
        self._ledger.reserve(size)
        self._reserved[item.key] = block
        self._leases.add_write(lease, block)

    def _publish(self, block: Resident, now_ns: int) -> None:
        self._move(block, "commit")
        del self._reserved[block.key]
        self._committed[block.key] = block
        self._ledger.unpin(block.size)
        if block.ttl_ns:
            block.expires_ns = now_ns + block.ttl_ns
            self._expiries.set(block.key, block.expires_ns)
            self._due_ns = min(self._due_ns, block.expires_ns)

    def _unlink(self, block: Resident) -> None:
        """Take a committed block out of the index: nobody finds it from here on."""
        del self._committed[block.key]
        self._policy.removed(block.key)
        if block.ttl_ns:
            self._expiries.drop(block.key)

    def _drop_used(self, block: Resident, event: str) -> None:
        """Give back the bytes of an unlinked block that no lease holds."""
        self._move(block, event)
        self._ledger.free_used(self._allocator.free(block.location.offset))

    def _doom(self, block: Resident) -> None:
        self._move(block, "doom")
        self._doomed[block.location.offset] = block
        self._story.record(self._now_ns, "doomed", 0, (block.key,))

    def _drain(self, block: Resident) -> None:
        self._move(block, "drain")
        del self._doomed[block.location.offset]
        self._ledger.free_pinned(self._allocator.free(block.location.offset))

    def _abandon(self, block: Resident) -> None:
        self._move(block, "abandon")
        del self._reserved[block.key]
        self._ledger.free_pinned(self._allocator.free(block.location.offset))

    def _move(self, block: Resident, event: str) -> None:
        after = TRANSITIONS.get((block.state, event))
        if after is None:
            raise self._story.error(f"{event} while {block.state.name}", block.key)
        block.state = after

    # Ends

    def _advance(self, now_ns: int) -> None:
        """Settle everything that is due at `now_ns`."""
        self._now_ns = now_ns
        if now_ns < self._due_ns:
            return
        while (lease := self._leases.due(now_ns)) is not None:
            self._counters["reclaimed_leases"] += 1
            self._end(lease, "lease ran out")
        while (key := self._expiries.pop_due(now_ns)) is not None:
            block = self._committed[BlockKey(key)]
            if not block.readers:
                self._expire(block)
        self._due_ns = min(self._leases.first_deadline_ns(), self._expiries.first_ns())

    def _end(self, lease: Lease, why: str) -> None:
        self._leases.end(lease)
        if lease.writes is not None:
            for block in lease.writes.values():
                if block.state is State.DOOMED:
                    self._drain(block)
                else:
                    self._abandon(block)
            self._story.record(self._now_ns, f"{why} before its commit", lease.id, tuple(lease.writes))
            return
        unpinned = 0
        over: list[Resident] = []
        for block in lease.reads:
            block.readers -= 1
            if block.readers:
                continue
            if block.state is State.DOOMED:
                self._drain(block)
                continue
            unpinned += block.size
            if block.expires_ns <= self._now_ns:
                over.append(block)
        self._ledger.unpin(unpinned)
        for block in over:
            self._expire(block)
        self._story.record(self._now_ns, why, lease.id, [block.key for block in lease.reads])

    def _expire(self, block: Resident) -> None:
        self._unlink(block)
        self._drop_used(block, "expire")
        self._story.record(self._now_ns, "expired", 0, (block.key,))
        self._counters["expired"] += 1

    # Arguments

    def _deadline(self, lease_ns: int, now_ns: int) -> int:
        deadline_ns = now_ns + min(lease_ns, self._limits.max_lease_ns)
        self._due_ns = min(self._due_ns, deadline_ns)
        return deadline_ns

    def _check_call(self, batch: int, owner: str, lease_ns: int) -> None:
        self._check_batch(batch)
        self._check_lease_ns(lease_ns)
        if len(owner) > self._limits.max_owner_chars:
            raise ConfigError(f"an owner's name has at most {self._limits.max_owner_chars} characters, got {len(owner)}")

    def _check_batch(self, batch: int) -> None:
        if batch > self._limits.max_blocks_per_call:
            raise ConfigError(f"{batch} blocks in one call, at most {self._limits.max_blocks_per_call}: split the call")

    def _check_lease_ns(self, lease_ns: int) -> None:
        if lease_ns <= 0:
            raise ConfigError(f"lease_ns must be positive, got {lease_ns}")


def _check_item(item: Reserve) -> None:
    key, parent, depth, length, ttl_ns = item
    if len(key) != KEY_BYTES or (parent is not None and len(parent) != KEY_BYTES):
        raise ConfigError(f"a key has {KEY_BYTES} bytes; got key {key.hex()}, parent {parent.hex() if parent else None}")
    if length <= 0 or depth < 0 or ttl_ns < 0 or parent == key:
        raise ConfigError(f"block {key.hex()}: length must be positive, depth and ttl_ns not negative, parent another block; got {item}")
