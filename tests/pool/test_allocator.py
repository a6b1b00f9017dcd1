"""The offset allocator: exact tiling, coalescing, utilisation."""

import itertools
import random
from collections import OrderedDict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.pool import InvariantError
from kvpool.pool.allocator import ALIGNMENT, Allocator, aligned
from kvpool.units import KIB, MIB


def test_allocator_offsets_are_aligned_and_disjoint() -> None:
    """Every frame starts on a cache line, and no byte belongs to two blocks."""
    allocator = Allocator(10 * KIB)
    offsets = [allocator.allocate(length) for length in (1, 64, 65, 1000)]
    assert offsets == [0, 64, 128, 256]
    assert allocator.extents() == [(0, 64), (64, 64), (128, 128), (256, 1024)]
    allocator.check()


def test_allocator_everything_freed_is_one_hole_again() -> None:
    """Coalescing: after any order of frees the largest request fits again."""
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [0, 2, 1, 3]):
        allocator = Allocator(4 * KIB)
        offsets = [allocator.allocate(KIB) for _ in range(4)]
        for index in order:
            assert allocator.free(offsets[index] or 0) == KIB
            allocator.check()
        assert (allocator.holes, allocator.allocate(4 * KIB)) == (1, 0)


def test_allocator_full_answers_none() -> None:
    """No room is a value, the caller evicts and asks again."""
    allocator = Allocator(KIB)
    assert allocator.allocate(KIB + 1) is None
    assert allocator.allocate(KIB) == 0
    assert allocator.allocate(1) is None
    assert allocator.free_bytes == 0


def test_allocator_prefers_the_hole_that_fits() -> None:
    """An exact hole is taken before a larger one is broken."""
    allocator = Allocator(64 * KIB)
    offsets = [allocator.allocate(length * KIB) for length in (8, 1, 4, 1, 8, 1)]
    for index in (0, 2, 4):
        allocator.free(offsets[index] or 0)
    assert allocator.allocate(4 * KIB) == offsets[2]


def test_allocator_free_of_nothing_is_an_invariant_error() -> None:
    """A double free would hand bytes out twice."""
    allocator = Allocator(KIB)
    offset = allocator.allocate(64)
    assert offset == 0
    allocator.free(0)
    with pytest.raises(InvariantError, match="offset 0"):
        allocator.free(0)


@pytest.mark.parametrize("capacity", [0, -1, ALIGNMENT - 1])
def test_allocator_without_capacity_is_refused(capacity: int) -> None:
    """A pool of nothing is a mistake in a flag."""
    with pytest.raises(ConfigError, match="capacity"):
        Allocator(capacity)


def test_allocator_odd_capacity_is_rounded_down() -> None:
    """The last partial line can't hold an aligned block."""
    allocator = Allocator(1000)
    assert (allocator.capacity_bytes, allocator.allocate(960)) == (960, 0)


def test_allocator_length_zero_is_refused() -> None:
    """Two blocks of no bytes would share an offset."""
    with pytest.raises(ConfigError, match="positive"):
        Allocator(KIB).allocate(0)


def test_allocator_largest_between_sees_gaps_edges_and_nothing() -> None:
    """The pool asks it before emptying itself for a block that can't fit."""
    allocator = Allocator(10 * KIB)
    offsets = [allocator.allocate(KIB) for _ in range(10)]
    assert allocator.largest_between([]) == 10 * KIB
    assert allocator.largest_between([offsets[6] or 0, offsets[2] or 0]) == 3 * KIB
    assert allocator.largest_between([0]) == 9 * KIB


@given(
    st.integers(1, 200).map(lambda n: n * 64),
    st.lists(st.one_of(st.tuples(st.just("a"), st.integers(1, 4096)), st.tuples(st.just("f"), st.integers(0, 63))), max_size=80),
)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_allocator_any_history_tiles_the_arena(capacity: int, history: list[tuple[str, int]]) -> None:
    """Extents never overlap, holes are maximal, counts are right, after every step; a refusal is honest within 3 %."""
    allocator = Allocator(capacity)
    live: list[tuple[int, int]] = []
    for action, number in history:
        if action == "a":
            offset = allocator.allocate(number)
            if offset is None:
                assert max(_holes(allocator, live), default=0) < aligned(number) * 33 // 32 + ALIGNMENT
            else:
                live.append((offset, aligned(number)))
        elif live:
            offset, size = live.pop(number % len(live))
            assert allocator.free(offset) == size
        allocator.check()
        assert allocator.extents() == sorted(live)
        assert allocator.free_bytes == capacity - sum(size for _, size in live)


def _holes(allocator: Allocator, live: list[tuple[int, int]]) -> list[int]:
    edges = [(0, 0), *sorted(live), (allocator.capacity_bytes, 0)]
    return [after[0] - before[0] - before[1] for before, after in itertools.pairwise(edges)]


def _sizes(kind: str, random_: random.Random) -> int:
    if kind == "log-uniform":
        return int(2 ** random_.uniform(14, 23))
    if kind == "uniform":
        return random_.randint(16 * KIB, 8 * MIB)
    return random_.choice([16 * KIB, 90 * KIB, 368_768, 720 * KIB, MIB, 2 * MIB, 8 * MIB])


@pytest.mark.parametrize("kind", ["log-uniform", "uniform", "models"])
def test_allocator_mixed_sizes_utilisation_is_at_least_95_percent(kind: str) -> None:
    """16 KiB to 8 MiB in one GiB: at the first refusal, and on average while the oldest make room for the newest."""
    random_ = random.Random(7)
    allocator = Allocator(1024 * MIB)
    live: OrderedDict[int, None] = OrderedDict()
    first, used = 0.0, list[float]()
    for _ in range(6000):
        length = _sizes(kind, random_)
        offset = allocator.allocate(length)
        while offset is None:
            first = first or 1 - allocator.free_bytes / allocator.capacity_bytes
            allocator.free(live.popitem(last=False)[0])
            offset = allocator.allocate(length)
        live[offset] = None
        if first:
            used.append(1 - allocator.free_bytes / allocator.capacity_bytes)
    allocator.check()
    assert first >= 0.95
    assert sum(used) / len(used) >= 0.95
    assert min(used) >= 0.95


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), max_size=12), st.randoms(use_true_random=False))
def test_runs_lie_behind_each_other_and_whatever_is_freed_together_leaves_whole_holes(runs: list[list[int]], chance: random.Random) -> None:
    """Blocks of one call are placed and freed together; nothing of that may be seen in what is left."""
    allocator, live = Allocator(100 * ALIGNMENT), list[int]()
    for run in runs:
        sizes = [units * ALIGNMENT for units in run]
        offsets = allocator.allocate_run(sizes)
        allocator.check()
        if offsets is not None:
            assert offsets == [offsets[0] + sum(sizes[:at]) for at in range(len(sizes))]
            live += offsets
        gone = chance.sample(live, chance.randint(0, len(live)))
        allocator.free_all(gone)
        live = [offset for offset in live if offset not in gone]
        allocator.check()
        assert [offset for offset, _ in allocator.extents()] == sorted(live)
    if live:
        with pytest.raises(InvariantError, match="nothing is allocated"):
            allocator.free_all([live[0], live[0]])
