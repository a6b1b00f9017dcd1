"""Relocation: plans over any history of an arena, with the bytes in it."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.block import BlockKey
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import Granted, PoolState, Reserve
from kvpool.pool.allocator import ALIGNMENT, Allocator, aligned
from kvpool.pool.story import InvariantError
from kvpool.pool.values import Move

UNITS = 40


class ArenaWithMoves(RuleBasedStateMachine):
    """Blocks come, go and are moved aside; each one's bytes are its own."""

    @initialize()
    def start(self) -> None:
        self.allocator = Allocator(UNITS * ALIGNMENT)
        self.bytes = bytearray(UNITS * ALIGNMENT)
        self.blocks: dict[int, tuple[int, int]] = {}  # offset: (length, mark)
        self.pinned: set[int] = set()
        self.serial = 0

    def write(self, offset: int, length: int) -> None:
        self.serial = self.serial % 250 + 1
        self.bytes[offset : offset + length] = bytes([self.serial]) * length
        self.blocks[offset] = (length, self.serial)

    @rule(length=st.integers(1, 12 * ALIGNMENT), budget=st.integers(0, UNITS), pin=st.booleans())
    def allocate(self, length: int, budget: int, pin: bool) -> None:
        """As the pool does: a hole, else a plan; never more copied than allowed, never what is pinned."""
        offset = self.allocator.allocate(length)
        if offset is None:
            before = self.allocator.extents()
            moves = self.allocator.plan_moves(length, lambda at: at not in self.pinned, budget * ALIGNMENT)
            assert self.allocator.extents() == before
            if moves is None:
                return
            assert sum(move.size for move in moves) <= budget * ALIGNMENT
            self.carry_out(moves)
            offset = self.allocator.allocate(length)
            assert offset is not None
        self.write(offset, length)
        if pin:
            self.pinned.add(offset)

    def carry_out(self, moves: list[Move]) -> None:
        self.allocator.apply(moves)
        for source, target, size in moves:
            assert source not in self.pinned
            self.bytes[target : target + size] = self.bytes[source : source + size]
            self.blocks[target] = self.blocks.pop(source)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.blocks:
            offset = data.draw(st.sampled_from(sorted(self.blocks)))
            del self.blocks[offset]
            self.pinned.discard(offset)
            self.allocator.free(offset)

    @invariant()
    def pieces_tile_the_arena(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check()
            assert dict(self.allocator.extents()) == {offset: aligned(length) for offset, (length, _) in self.blocks.items()}

    @invariant()
    def bytes_are_where_their_blocks_are(self) -> None:
        if hasattr(self, "allocator"):
            for offset, (length, mark) in self.blocks.items():
                assert self.bytes[offset : offset + length] == bytes([mark]) * length


ArenaWithMoves.TestCase.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestArenaWithMoves = ArenaWithMoves.TestCase


def striped(blocks: int) -> Allocator:
    """An arena of single units of which every other one is free."""
    allocator = Allocator(blocks * ALIGNMENT)
    for offset in [allocator.allocate(1) for _ in range(blocks)][::2]:
        assert offset is not None
        allocator.free(offset)
    return allocator


def test_half_free_arena_gives_a_large_block_after_few_moves() -> None:
    """Half of the bytes are free and no two of them together: exactly what evicting more would waste."""
    allocator = striped(32)
    assert allocator.allocate(4 * ALIGNMENT) is None
    moves = allocator.plan_moves(4 * ALIGNMENT, lambda offset: True, 8 * ALIGNMENT)
    assert moves is not None
    assert len(moves) <= 3
    allocator.apply(moves)
    assert allocator.allocate(4 * ALIGNMENT) is not None
    allocator.check()


def test_large_block_between_two_holes_slides() -> None:
    """It fits nowhere else, and no hole takes the request: packed to one side, it leaves both holes as one. The copy overlaps itself."""
    allocator = Allocator(10 * ALIGNMENT)
    first, block, last = (allocator.allocate(units * ALIGNMENT) for units in (2, 5, 3))
    assert (first, block, last) == (0, 2 * ALIGNMENT, 7 * ALIGNMENT)
    allocator.free(0)
    allocator.free(7 * ALIGNMENT)
    moves = allocator.plan_moves(5 * ALIGNMENT, lambda offset: True, 5 * ALIGNMENT)
    assert moves == [Move(2 * ALIGNMENT, 0, 5 * ALIGNMENT)]
    allocator.apply(moves)
    assert allocator.allocate(5 * ALIGNMENT) == 5 * ALIGNMENT
    allocator.check()


def test_nothing_is_copied_while_little_is_free_and_others_may_leave() -> None:
    """Moving when full mixes the ages of neighbours; a fiftieth of the arena as slack is what keeps copies rare."""
    allocator = Allocator(1000 * ALIGNMENT)
    allocator.allocate(980 * ALIGNMENT)
    assert allocator.move_budget(ALIGNMENT, others_may_leave=True) == 0
    assert allocator.move_budget(ALIGNMENT, others_may_leave=False) == 4 * ALIGNMENT
    allocator.free(0)
    assert allocator.move_budget(ALIGNMENT, others_may_leave=True) == 4 * ALIGNMENT


def test_pool_moves_blocks_when_nobody_may_leave() -> None:
    """Blocks that wait to be written down stay, but may lie elsewhere: half of the arena is free, so there is room."""
    pool = PoolState(4 * ALIGNMENT, PrefixLru())
    pool.guard(True)
    keys = [BlockKey(bytes([i]) * 32) for i in range(5)]
    got = pool.reserve([Reserve(key, None, 0, ALIGNMENT) for key in keys[:4]], owner="w", lease_ns=10, now_ns=0)
    pool.commit(got.lease_id, keys[:4], 0)
    pool.discard(keys[0])
    pool.discard(keys[2])
    got = pool.reserve([Reserve(keys[4], None, 0, 2 * ALIGNMENT)], owner="w", lease_ns=10, now_ns=1)
    assert isinstance(got.grants[0], Granted)
    assert [move.size for move in got.moves] == [ALIGNMENT]
    assert pool.counters()["evicted"] == 0
    pool.check()


@pytest.mark.parametrize(
    ("movable", "budget"),
    [(lambda offset: False, 100 * ALIGNMENT), (lambda offset: True, 0)],
    ids=["all pinned", "no budget"],
)
def test_no_plan_where_nothing_may_move(movable: Callable[[int], bool], budget: int) -> None:
    """None is the answer that lets the pool evict one more."""
    assert striped(32).plan_moves(4 * ALIGNMENT, movable, budget) is None


def test_no_plan_for_more_than_is_free() -> None:
    """Moving can't make bytes."""
    assert striped(32).plan_moves(17 * ALIGNMENT, lambda offset: True, 100 * ALIGNMENT) is None


def test_apply_refuses_moves_that_fit_nothing() -> None:
    """A plan that is out of date must not corrupt the map."""
    allocator = striped(8)
    for wrong in (Move(0, ALIGNMENT, ALIGNMENT), Move(ALIGNMENT, 0, 2 * ALIGNMENT), Move(ALIGNMENT, 3 * ALIGNMENT, ALIGNMENT)):
        with pytest.raises(InvariantError, match="an extent of"):
            allocator.apply([wrong])
    allocator.check()


def test_plans_are_the_same_every_time() -> None:
    """A seed of the simulation replays anywhere."""
    plans = [striped(64).plan_moves(6 * ALIGNMENT, lambda offset: offset % 5 != 0, 20 * ALIGNMENT) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0]
