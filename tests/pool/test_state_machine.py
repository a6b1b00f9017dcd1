"""PoolState against a model of plain dicts, under any history Hypothesis can think of.

The model has a real arena: a granted block is written at once with bytes only it has. Whoever may still look at bytes (live
leases of both kinds) is checked after every step, so handing leased bytes out twice can't stay unseen.
"""

import itertools
from dataclasses import dataclass, field
from hashlib import sha256

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.block import BlockKey
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import EXISTS, NO_SPACE, Granted, PinOutcome, PoolLimits, PoolState, Reserve, Reserved

PARENTS = [None, 0, 1, 2, 1, 4, 0, None, 7, 8, 8, None]  # a small forest: block i continues PARENTS[i]
KEYS = [BlockKey(sha256(b"%d" % i).digest()) for i in range(len(PARENTS))]
BLOCKS = st.integers(0, len(KEYS) - 1)
BATCHES = st.lists(BLOCKS, min_size=1, max_size=5)
TTLS = st.sampled_from([0, 0, 5, 15])
TENANTS = ("", "t")  # of even and odd blocks
LENGTHS = st.sampled_from([1, 64, 100, 128, 200, 256, 640])


def depth(block: int) -> int:
    parent = PARENTS[block]
    return 0 if parent is None else depth(parent) + 16


def lineage(block: int) -> list[int]:
    parent = PARENTS[block]
    return [block] if parent is None else [*lineage(parent), block]


@dataclass
class Copy:
    """One incarnation of a block: its place, its bytes."""

    block: int
    offset: int
    length: int
    content: bytes
    expires: int | None = None
    ttl: int = 0


@dataclass
class Held:
    """A lease as the model knows it."""

    deadline: int
    write: bool
    copies: list[Copy]
    finished: list[Copy] = field(default_factory=list)


class PoolAgainstModel(RuleBasedStateMachine):
    @initialize(units=st.integers(2, 24), tight=st.booleans())
    def start(self, units: int, tight: bool) -> None:
        limits = PoolLimits(max_leases=4, max_leased_blocks=12, max_blocks=6, max_lease_ns=40) if tight else PoolLimits()
        self.limits = limits
        self.pool = PoolState(units * 64, PrefixLru(), limits)
        self.arena = bytearray(units * 64)
        self.now = 0
        self.serial = 0
        self.committed: dict[int, Copy] = {}
        self.reserved: dict[int, Copy] = {}
        self.leases: dict[int, Held] = {}
        self.pins: dict[tuple[int, str], tuple[bool, int]] = {}  # (block, owner): (hard, deadline)
        self.dirty: set[int] = set()
        self.guarded = False
        self.quota: int | None = None

    # What the model does by itself

    def settle(self) -> None:
        """Leases and ttls that are due."""
        for lease_id in [i for i, held in self.leases.items() if held.deadline <= self.now]:
            self.end(lease_id)
        for name in [name for name, (_, deadline) in self.pins.items() if deadline <= self.now]:
            del self.pins[name]
        self.sweep()

    def sweep(self) -> None:
        for block, copy in list(self.committed.items()):
            if copy.expires is not None and copy.expires <= self.now and not self.readers(copy) and not self.hard(block):
                self.lose(block)

    def lose(self, block: int) -> None:
        """A committed block is gone, and its pins with it."""
        del self.committed[block]
        self.dirty.discard(block)
        for name in [name for name in self.pins if name[0] == block]:
            del self.pins[name]

    def hard(self, block: int) -> bool:
        return any(hard for (pinned, _), (hard, _) in self.pins.items() if pinned == block)

    def pinned(self, block: int) -> bool:
        return any(pinned == block for pinned, _ in self.pins)

    def end(self, lease_id: int) -> None:
        held = self.leases.pop(lease_id)
        if held.write:
            for copy in held.copies:
                if self.reserved.get(copy.block) is copy:
                    del self.reserved[copy.block]

    def readers(self, copy: Copy) -> int:
        return sum(c is copy for held in self.leases.values() if not held.write for c in held.copies)

    def deadline(self, lease: int) -> int:
        return self.now + min(lease, self.limits.max_lease_ns)

    # Rules

    @rule(blocks=BATCHES, length=LENGTHS, lease=st.integers(1, 60), ttl=TTLS)
    def reserve(self, blocks: list[int], length: int, lease: int, ttl: int) -> None:
        self.settle()
        parents = [PARENTS[block] for block in blocks]
        items = [
            Reserve(KEYS[b], None if p is None else KEYS[p], depth(b), length, ttl, tenant=TENANTS[b % 2])
            for b, p in zip(blocks, parents, strict=True)
        ]
        before = self.pool.books()
        got = self.pool.reserve(items, owner="w", lease_ns=lease, now_ns=self.now)
        self.note_moves(got)
        self.note_evictions(set(blocks) | {p for p in parents if p is not None})
        copies: list[Copy] = []
        for block, grant in zip(blocks, got.grants, strict=True):
            assert (grant is EXISTS) == (block in self.committed or block in self.reserved)
            if isinstance(grant, Granted):
                copies.append(self.write(block, grant.offset, length, ttl))
        assert (got.lease_id != 0) == bool(copies)
        if copies:
            self.leases[got.lease_id] = Held(self.deadline(lease), True, copies)
        if self.quota is not None and any(isinstance(g, Granted) and b % 2 for b, g in zip(blocks, got.grants, strict=True)):
            assert self.pool.quotas()[TENANTS[1]].used_bytes <= self.quota
        if before.pinned == 0 and parents == [None] and got.grants[0] is NO_SPACE and not self.dirty and not (blocks[0] % 2 and self.quota):
            assert length > before.capacity or self.quota == 0
        assert not got.waiting or (self.dirty and NO_SPACE in got.grants)

    @rule(block=BLOCKS, length=LENGTHS, ttl=TTLS)
    def put_chain(self, block: int, length: int, ttl: int) -> None:
        """The usual client: a whole chain, reserved and committed at once."""
        chain = lineage(block)
        self.reserve(chain, length, 10, ttl)
        if self.leases and self.leases[max(self.leases)].write:
            self.commit_under(max(self.leases), chain)

    def write(self, block: int, offset: int, length: int, ttl: int) -> Copy:
        self.serial += 1
        content = bytes([self.serial % 251 + 1]) * length
        self.arena[offset : offset + length] = content
        copy = Copy(block, offset, length, content, ttl=ttl)
        self.reserved[block] = copy
        return copy

    def note_moves(self, got: Reserved) -> None:
        """What the shell does: copy inside the arena, in order. Whoever holds a lease must not notice."""
        for move in got.moves:
            self.arena[move.target : move.target + move.size] = self.arena[move.source : move.source + move.size]
            for copy in self.committed.values():
                if copy.offset == move.source:
                    assert not self.readers(copy)
                    copy.offset = move.target

    def note_evictions(self, named: set[int]) -> None:
        """Blocks that are gone after a reserve: none leased, none named, and no head before its tail."""
        present = self.pool.lookup(KEYS, self.now)
        gone = [block for block in self.committed if not present[block]]
        for block in gone:
            assert not self.readers(self.committed[block])
            assert block not in named
            assert not self.hard(block)
            assert block not in self.dirty
        softly = [block for block in gone if self.pinned(block)]
        if softly and self.quota is None:
            spared = {b for b in self.committed if b not in gone and not self.pinned(b) and b not in named | self.dirty}
            assert not [block for block in spared if not self.readers(self.committed[block]) and not self.above_kept(block, gone)]
        for block in gone:
            pinned = self.pinned(block)
            assert not [c for c in self.committed if PARENTS[c] == block and c not in gone and self.pinned(c) == pinned]
        for block in gone:
            self.lose(block)

    def above_kept(self, block: int, gone: list[int]) -> bool:
        """Whether a block stays because a descendant of it does."""
        return any(block in lineage(other) for other in self.committed if other != block and other not in gone)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), blocks=BATCHES)
    def commit(self, data: st.DataObject, blocks: list[int]) -> None:
        lease_id = data.draw(st.sampled_from([*sorted(self.leases), max(self.leases) + 1]))
        held = self.leases.get(lease_id)
        own = [copy.block for copy in held.copies + held.finished] if held is not None else []
        self.settle()
        self.commit_under(lease_id, blocks + data.draw(st.permutations(own)))

    def commit_under(self, lease_id: int, blocks: list[int]) -> None:
        done = self.pool.commit(lease_id, [KEYS[block] for block in blocks], self.now)
        held = self.leases.get(lease_id)
        for block, ok in zip(blocks, done, strict=True):
            assert ok == (held is not None and held.write and self.commit_one(held, block))
        if held is not None and held.write and not held.copies:
            del self.leases[lease_id]

    def commit_one(self, held: Held, block: int) -> bool:
        copy = next((c for c in held.copies if c.block == block), None)
        if copy is None:
            return any(self.committed.get(block) is c for c in held.finished)
        held.copies.remove(copy)
        held.finished.append(copy)
        if self.reserved.get(block) is not copy:
            return False
        self.committed[block] = self.reserved.pop(block)
        if self.guarded:
            self.dirty.add(block)
        if copy.ttl:
            copy.expires = self.now + copy.ttl
        return True

    @rule(block=BLOCKS, lease=st.integers(1, 60))
    def acquire_chain(self, block: int, lease: int) -> None:
        """The usual reader: head to tail."""
        self.acquire(lineage(block), lease)

    @rule(blocks=BATCHES, lease=st.integers(1, 60))
    def acquire(self, blocks: list[int], lease: int) -> None:
        self.settle()
        expected = [self.committed.get(block) for block in blocks]
        hits = [copy for copy in expected if copy is not None]
        references = sum(len(held.copies) for held in self.leases.values())
        full = len(self.leases) >= self.limits.max_leases or references + len(hits) > self.limits.max_leased_blocks
        got = self.pool.acquire([KEYS[block] for block in blocks], owner="r", lease_ns=lease, now_ns=self.now)
        assert [None if at is None else (at.offset, at.length) for at in got.found] == [
            None if copy is None or full else (copy.offset, copy.length) for copy in expected
        ]
        assert (got.lease_id != 0) == (bool(hits) and not full)
        if got.lease_id:
            self.leases[got.lease_id] = Held(self.deadline(lease), False, hits)

    @rule(blocks=BATCHES)
    def lookup(self, blocks: list[int]) -> None:
        self.settle()
        present = self.pool.lookup([KEYS[block] for block in blocks], self.now)
        assert list(present) == [block in self.committed for block in blocks]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), lease=st.integers(1, 60))
    def renew(self, data: st.DataObject, lease: int) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        self.settle()
        alive = self.pool.renew(lease_id, lease, self.now)
        assert alive == (lease_id in self.leases)
        if alive:
            self.leases[lease_id].deadline = max(self.leases[lease_id].deadline, self.deadline(lease))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        self.settle()
        assert self.pool.release(lease_id, self.now) == (lease_id in self.leases)
        if lease_id in self.leases:
            self.end(lease_id)
        self.sweep()

    @rule(block=BLOCKS)
    def discard(self, block: int) -> None:
        there = block in self.committed or block in self.reserved
        assert self.pool.discard(KEYS[block]) == there
        if block in self.committed:
            self.lose(block)
        self.reserved.pop(block, None)

    @rule(blocks=BATCHES, owner=st.sampled_from("ab"), hard=st.booleans(), duration=st.integers(1, 60))
    def pin(self, blocks: list[int], owner: str, hard: bool, duration: int) -> None:
        self.settle()
        got = self.pool.pin([KEYS[block] for block in blocks], owner=owner, hard=hard, duration_ns=duration, now_ns=self.now)
        for block, outcome in zip(blocks, got, strict=True):
            assert (outcome is PinOutcome.ABSENT) == (block not in self.committed)
            if outcome is PinOutcome.PINNED:
                self.pins[block, owner] = (hard, self.now + duration)
            elif outcome is PinOutcome.REFUSED:
                held = sum(-(-copy.length // 64) * 64 for b, copy in self.committed.items() if self.hard(b) or b == block)
                assert hard
                assert held > len(self.arena) // 2
        self.sweep()

    @rule(blocks=BATCHES, owner=st.sampled_from("ab"))
    def unpin(self, blocks: list[int], owner: str) -> None:
        self.settle()
        expected = {(block, owner) for block in blocks} & self.pins.keys()
        assert self.pool.unpin([KEYS[block] for block in blocks], owner=owner, now_ns=self.now) == len(expected)
        for name in expected:
            del self.pins[name]
        self.sweep()

    @rule(on=st.booleans())
    def guard(self, on: bool) -> None:
        self.pool.guard(on)
        self.guarded = on
        if not on:
            self.dirty.clear()

    @rule(blocks=BATCHES)
    def flushed(self, blocks: list[int]) -> None:
        self.pool.mark([KEYS[block] for block in blocks], dirty=False)
        self.dirty.difference_update(blocks)

    @rule(quota=st.sampled_from([None, 0, 128, 640, 1280]))
    def set_quota(self, quota: int | None) -> None:
        self.pool.set_quota(TENANTS[1], quota)
        self.quota = quota

    @rule(blocks=BATCHES, lease=st.integers(1, 60))
    def hold(self, blocks: list[int], lease: int) -> None:
        """Holding pins like a reader, but is no use of the block."""
        before = {key: count for key, count in self.pool.counters().items() if key in ("hits", "misses")}
        self.settle()
        hits = [self.committed[block] for block in blocks if block in self.committed]
        got = self.pool.hold([KEYS[block] for block in blocks], owner="h", lease_ns=lease, now_ns=self.now)
        if got.lease_id:
            self.leases[got.lease_id] = Held(self.deadline(lease), False, hits)
        assert {key: count for key, count in self.pool.counters().items() if key in before} == before

    @rule(nbytes=st.integers(1, 2000))
    def coldest(self, nbytes: int) -> None:
        """Who would leave next: committed, not held by anyone, each once."""
        self.settle()
        named = self.pool.coldest(nbytes, self.now)
        blocks = [KEYS.index(key) for key in named]
        assert len(set(blocks)) == len(blocks)
        assert all(block in self.committed and not self.readers(self.committed[block]) and not self.hard(block) for block in blocks)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), offset=st.integers(0, 30), length=st.integers(0, 6))
    def leased_ranges(self, data: st.DataObject, offset: int, length: int) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        self.pool.tick(self.now)
        self.settle()
        held = self.leases.get(lease_id)
        touchable = set[int]()
        for copy in held.copies if held is not None else []:
            touchable.update(range(copy.offset // 64, -(-(copy.offset + copy.length) // 64)))
        expected = length > 0 and touchable.issuperset(range(offset, offset + length))
        assert self.pool.leased_ranges(lease_id, [(offset * 64, length * 64)]) == expected

    @rule(by=st.integers(1, 10))
    def pass_time(self, by: int) -> None:
        self.now += by

    @rule()
    def tick(self) -> None:
        self.pool.tick(self.now)
        self.settle()

    # After every step

    @invariant()
    def books_balance_and_everything_agrees(self) -> None:
        if hasattr(self, "pool"):
            books = self.pool.books()
            assert books.free + books.used + books.pinned == books.capacity
            self.pool.check()

    @invariant()
    def no_live_bytes_were_overwritten(self) -> None:
        if not hasattr(self, "pool"):
            return
        live = [copy for held in self.leases.values() for copy in held.copies if held.deadline > self.now]
        live += list(self.committed.values())
        extents = sorted({(copy.offset, copy.length) for copy in live})
        for copy in live:
            assert bytes(self.arena[copy.offset : copy.offset + copy.length]) == copy.content
        for (offset, length), (following, _) in itertools.pairwise(extents):
            assert offset + length <= following

    def teardown(self) -> None:
        """Everything is reclaimable once all leases and ttls have run out."""
        if hasattr(self, "pool"):
            self.pool.guard(False)
            self.pool.set_quota(TENANTS[1], None)
            self.pool.tick(self.now + 1000)
            books = self.pool.books()
            assert (books.pinned, books.read_leases, books.write_leases) == (0, 0, 0)
            got = self.pool.reserve([Reserve(KEYS[0], None, 0, books.capacity)], owner="w", lease_ns=1, now_ns=self.now + 1000)
            assert got.grants[0] == (EXISTS if self.pool.lookup(KEYS[:1], self.now + 1000)[0] else Granted(0))
            self.pool.check()


PoolAgainstModel.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPoolAgainstModel = PoolAgainstModel.TestCase
