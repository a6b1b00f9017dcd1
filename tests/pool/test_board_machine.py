"""What readers who never ask may rely on, under any history Hypothesis can think of: the board, holds, slabs, fences, moves.

The arena is real bytes. Every writer writes bytes that only its block has, into all that it was granted, as soon as it has it; a writer
whose lease ran out goes on writing while its fence lasts. The board looks at the arena whenever something is published. So bytes that
are announced too early, or are given away too early, are seen at once.
"""

import itertools
from collections.abc import Sequence
from hashlib import sha256

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.block import BlockKey
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import EXISTS, NO_SPACE, Granted, Move, PoolLimits, PoolState, Reserve
from kvpool.pool.resident import Resident
from kvpool.testing.board_twin import BoardTwin, Record

KEYS = [BlockKey(sha256(b"%d" % i).digest()) for i in range(10)]
BLOCKS = st.integers(0, len(KEYS) - 1)
BATCHES = st.lists(BLOCKS, min_size=1, max_size=4)
LENGTHS = st.sampled_from([1, 64, 100, 128, 256, 640])
FENCE = 7
Span = tuple[int, int]


def units(length: int) -> int:
    return -(-length // 64) * 64


class LookingBoard(BoardTwin):
    """Looks at the bytes of what is published."""

    def __init__(self, machine: "BoardMachine", room: int) -> None:
        super().__init__(room)
        self.machine = machine

    def publish(self, blocks: Sequence[Resident]) -> None:
        super().publish(blocks)
        for block in blocks:
            assert self.machine.bytes_at(*block.location) == self.machine.content[block.key][: block.location.length]


class BoardMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(4, 20), fenced=st.booleans(), room=st.sampled_from([1, 3, 100]), most=st.sampled_from([4, 100]))
    def start(self, size: int, fenced: bool, room: int, most: int) -> None:
        self.limits = PoolLimits(fence_ns=FENCE if fenced else 0, max_blocks=most)
        self.arena = bytearray(size * 64)
        self.board = LookingBoard(self, room)
        self.pool = PoolState(size * 64, PrefixLru(), self.limits, board=self.board)
        self.now = self.serial = 0
        self.content: dict[BlockKey, bytes] = {}  # what the latest writer of a key wrote
        self.writing: dict[int, tuple[int, dict[BlockKey, tuple[Span, bytes]]]] = {}  # by lease: deadline, what it wrote where
        self.slabs: dict[int, tuple[int, Span, bytes]] = {}  # by lease: deadline, bytes, what was written there
        self.zombies: list[tuple[int, Span]] = []  # until when whose bytes are fenced off
        self.holds: dict[int, tuple[Record, bytes]] = {}
        self.read_leases: list[tuple[int, Span, bytes]] = []

    def bytes_at(self, offset: int, length: int) -> bytes:
        return bytes(self.arena[offset : offset + length])

    def scribble(self, offset: int, length: int) -> bytes:
        """Bytes that nobody has written before."""
        self.serial += 1
        data = (self.serial.to_bytes(4, "little") * (length // 4 + 1))[:length]
        self.arena[offset : offset + length] = data
        return data

    def owned(self) -> list[Span]:
        """Bytes that somebody may be looking at or writing."""
        spans = [span for deadline, granted in self.writing.values() if deadline > self.now for span, _ in granted.values()]
        spans += [span for deadline, span, _ in self.slabs.values() if deadline > self.now]
        spans += [span for until, span in self.zombies if until > self.now]
        spans += [(record.offset, record.length) for record, _ in self.holds.values()]
        return spans + [(record.offset, record.length) for record in self.board.records.values()]

    def settle(self) -> None:
        """Write leases that are due leave zombies: for a fence at least, since the pool may notice later."""
        for lease_id, (deadline, granted) in list(self.writing.items()):
            if deadline <= self.now:
                self.zombies += [(deadline + self.limits.fence_ns, span) for span, _ in granted.values()]
                del self.writing[lease_id]
        for lease_id, (deadline, span, _) in list(self.slabs.items()):
            if deadline <= self.now:
                self.zombies.append((deadline + self.limits.fence_ns, span))
                del self.slabs[lease_id]
        self.zombies = [(until, span) for until, span in self.zombies if until > self.now]

    def granted(self, spans: list[Span], moves: tuple[Move, ...]) -> None:
        """New bytes are nobody's, and none that move are announced; then the shell copies, and says so."""
        targets = [(move.target, move.size) for move in moves]
        for offset, length in spans + targets + [(move.source, move.size) for move in moves]:
            for at, size in self.owned():
                assert offset + length <= at or at + size <= offset
        for source, target, size in moves:
            self.arena[target : target + size] = self.arena[source : source + size]
        self.pool.moved(moves)

    # Rules

    @rule(blocks=BATCHES, length=LENGTHS, lease=st.integers(1, 30), late=st.sets(BLOCKS, max_size=3), ttl=st.sampled_from([0, 0, 9]))
    def reserve(self, blocks: list[int], length: int, lease: int, late: set[int], ttl: int) -> None:
        self.settle()
        self.begin_late(late)
        items = [Reserve(KEYS[block], None, 0, length, ttl) for block in blocks]
        got = self.pool.reserve(items, owner="w", lease_ns=lease, now_ns=self.now)
        self.note_late()
        places = {item.key: (grant.offset, length) for item, grant in zip(items, got.grants, strict=True) if isinstance(grant, Granted)}
        self.granted(list(places.values()), got.moves)
        written = {key: ((offset, units(size)), self.scribble(offset, units(size))) for key, (offset, size) in places.items()}
        self.content.update({key: data for key, (_, data) in written.items()})
        if places:
            self.writing[got.lease_id] = (self.now + lease, written)

    @rule(late=st.booleans(), first=st.integers(0, 1))
    def squeeze(self, late: bool, first: int) -> None:
        """Every second block is gone, and one that fits no hole is wanted: where the arena is small, others must move."""
        for block in range(8):
            self.reserve([block], 64, 30, set(), 0)
            lease_id = max(self.writing, default=0)
            if lease_id and KEYS[block] in self.writing[lease_id][1]:
                del self.writing[lease_id]
                self.pool.commit(lease_id, [KEYS[block]], self.now)
        for block in range(first, 8, 2):
            self.discard(block, False, False)
        self.reserve([8], 256, 5, set(range(8)) if late else set(), 0)

    def begin_late(self, late: set[int]) -> None:
        """Readers that begin to hold a block just before it is withdrawn."""
        self.board.late = {KEYS[block] for block in late}

    def note_late(self) -> None:
        self.board.late = set()
        for number, record in self.board.holds.items():
            if number not in self.holds:
                self.holds[number] = (record, self.bytes_at(record.offset, record.length))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), unverified=st.booleans())
    def commit(self, data: st.DataObject, unverified: bool) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.writing)))
        deadline, places = self.writing.pop(lease_id)
        keys = data.draw(st.permutations(sorted(places)))
        done = self.pool.commit(lease_id, keys, self.now, unverified=unverified)
        if deadline <= self.now:
            self.writing[lease_id] = (deadline, places)
            assert not any(done)
        for key, ok in zip(keys, done, strict=True):
            assert not ok or key not in self.board.records or self.board.records[key].unverified == unverified

    @precondition(lambda self: self.writing or self.slabs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted([*self.writing, *self.slabs])))
        self.settle()
        self.pool.tick(self.now)
        free = self.pool.books().free
        alive = lease_id in self.writing or lease_id in self.slabs
        assert self.pool.release(lease_id, self.now) == alive
        given = [span for span, _ in self.writing.pop(lease_id, (0, {}))[1].values()]
        if lease_id in self.slabs:
            given.append(self.slabs.pop(lease_id)[1])
        assert self.pool.books().free - free == sum(length for _, length in given)

    @rule(nbytes=st.integers(1, 900), lease=st.integers(1, 40), late=st.sets(BLOCKS, max_size=3))
    def slab(self, nbytes: int, lease: int, late: set[int]) -> None:
        self.settle()
        self.begin_late(late)
        got = self.pool.grant_slab(nbytes, owner="s", lease_ns=lease, now_ns=self.now)
        self.note_late()
        if got is None:
            return
        assert got.nbytes == units(nbytes)
        self.granted([(got.offset, got.nbytes)], got.moves)
        data = self.scribble(got.offset, got.nbytes)
        self.slabs[got.lease_id] = (self.now + lease, (got.offset, got.nbytes), data)
        assert self.pool.leased_ranges(got.lease_id, [(got.offset, got.nbytes)], write=True)

    @precondition(lambda self: self.slabs)
    @rule(data=st.data(), blocks=BATCHES, length=LENGTHS, verified=st.booleans(), late=st.sets(BLOCKS, max_size=3))
    def carve(self, data: st.DataObject, blocks: list[int], length: int, verified: bool, late: set[int]) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.slabs)))
        _, (start, size), _ = self.slabs[lease_id]
        self.settle()
        self.pool.tick(self.now)
        size_each = units(length)
        blocks = blocks[: size // size_each]
        there = {key for key in KEYS if self.pool.locate(key) is not None or self.pool.writing(key)}
        old = {key: self.content[key] for key in there}
        for index, block in enumerate(blocks):
            if lease_id in self.slabs:
                written = self.scribble(start + index * size_each, size_each)
                if KEYS[block] not in there and block not in blocks[:index]:
                    self.content[KEYS[block]] = written
        self.begin_late(late)
        books = self.pool.books()
        before = self.pool.counters()
        grants = self.pool.carve(lease_id, [Reserve(KEYS[block], None, 0, length) for block in blocks], self.now, verified=verified)
        self.note_late()
        if lease_id not in self.slabs:
            assert grants == (NO_SPACE,) * len(blocks)
            return
        assert all(self.content[key] == value for key, value in old.items())
        assert self.pool.counters()["inserted"] - before["inserted"] == sum(isinstance(grant, Granted) for grant in grants)
        assert self.pool.books().capacity == books.capacity
        for index, (block, grant) in enumerate(zip(blocks, grants, strict=True)):
            if isinstance(grant, Granted):
                assert grant.offset == start + index * size_each
            else:
                assert grant is NO_SPACE or KEYS[block] in there or block in blocks[:index]
                assert grant is EXISTS or len(self.pool.committed_keys()) <= self.limits.max_blocks
        taken = len(blocks) * size_each
        deadline, _, _ = self.slabs.pop(lease_id)
        if taken < size:
            rest = (start + taken, size - taken)
            self.slabs[lease_id] = (deadline, rest, self.bytes_at(*rest))

    @rule(block=BLOCKS)
    def hold(self, block: int) -> None:
        number = self.board.hold(KEYS[block])
        record = self.board.records.get(KEYS[block])
        if record is not None:
            self.holds[number] = (record, self.bytes_at(record.offset, record.length))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.holds)))
        del self.holds[number]
        self.board.release(number)

    @rule(blocks=BATCHES, lease=st.integers(1, 30))
    def acquire(self, blocks: list[int], lease: int) -> None:
        got = self.pool.acquire([KEYS[block] for block in blocks], owner="r", lease_ns=lease, now_ns=self.now)
        for place in got.found:
            if place is not None:
                self.read_leases.append((self.now + lease, place, self.bytes_at(*place)))

    @rule(blocks=BATCHES)
    def touch(self, blocks: list[int]) -> None:
        self.pool.tick(self.now)
        before = self.pool.counters()["hits"]
        self.pool.touch([KEYS[block] for block in blocks], self.now)
        assert self.pool.counters()["hits"] - before == sum(self.pool.locate(KEYS[block]) is not None for block in blocks)

    @rule(block=BLOCKS, late=st.booleans(), leased=st.booleans())
    def discard(self, block: int, late: bool, leased: bool) -> None:
        if leased:
            self.acquire([block], 1)
            self.hold(block)
        self.begin_late({block} if late else set())
        self.pool.discard(KEYS[block])
        self.note_late()
        assert self.pool.locate(KEYS[block]) is None
        assert KEYS[block] not in self.board.records

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def zombie_writes(self, data: st.DataObject) -> None:
        """A writer whose lease ran out goes on, as long as its fence lasts."""
        self.settle()
        if self.zombies:
            _, span = data.draw(st.sampled_from(self.zombies))
            self.scribble(*span)

    @rule(by=st.integers(1, 10))
    def pass_time(self, by: int) -> None:
        self.now += by

    @rule(late=st.sets(BLOCKS, max_size=3))
    def tick(self, late: set[int]) -> None:
        self.begin_late(late)
        self.pool.tick(self.now)
        self.note_late()
        self.settle()

    # After every step

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()

    @invariant()
    def what_the_board_says_is_so(self) -> None:
        if not hasattr(self, "pool"):
            return
        for key, record in self.board.records.items():
            assert self.pool.locate(key) == (record.offset, record.length)
            assert self.bytes_at(record.offset, record.length) == self.content[key][: record.length]
        if self.board.room > len(KEYS):
            assert set(self.board.records) == set(self.pool.committed_keys())

    @invariant()
    def what_is_held_or_leased_stays(self) -> None:
        if not hasattr(self, "pool"):
            return
        for record, data in self.holds.values():
            assert self.bytes_at(record.offset, record.length) == data
        for deadline, place, data in self.read_leases:
            assert deadline <= self.now or self.bytes_at(*place) == data
        for deadline, span, data in self.slabs.values():
            assert deadline <= self.now or self.bytes_at(*span) == data
        for deadline, granted in self.writing.values():
            for span, data in granted.values():
                assert deadline <= self.now or self.bytes_at(*span) == data

    @invariant()
    def nobodys_bytes_overlap(self) -> None:
        if not hasattr(self, "pool"):
            return
        writers = [span for deadline, granted in self.writing.values() if deadline > self.now for span, _ in granted.values()]
        writers += [span for deadline, span, _ in self.slabs.values() if deadline > self.now]
        writers += [span for until, span in self.zombies if until > self.now]
        readers = {(record.offset, record.length) for record, _ in self.holds.values()}
        readers |= {(record.offset, record.length) for record in self.board.records.values()}
        for (offset, length), (following, _) in itertools.pairwise(sorted([*writers, *readers])):
            assert offset + length <= following

    def teardown(self) -> None:
        """Everything is free to go once nobody holds, leases or writes anything."""
        if hasattr(self, "pool"):
            for number in self.holds:
                self.board.release(number)
            self.pool.tick(self.now + 1000)
            self.pool.tick(self.now + 1000 + FENCE)  # what ran out just then
            self.pool.check()
            assert self.pool.books().pinned == 0
            assert self.pool.next_due_ns() is None


BoardMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestBoardMachine = BoardMachine.TestCase
