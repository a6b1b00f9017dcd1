"""Slabs: bytes in advance, blocks cut off their front, every byte that isn't a block's given back."""

from hashlib import sha256

import pytest

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import EXISTS, NO_SPACE, Granted, InvariantError, PoolLimits, PoolState, Reserve, SlabGrant
from kvpool.pool.allocator import Allocator
from kvpool.testing.board_twin import BoardTwin

KEYS = [BlockKey(sha256(b"%d" % i).digest()) for i in range(10)]
FOREVER = 10**9


def pool_of(units: int, limits: PoolLimits | None = None, board: BoardTwin | None = None) -> PoolState:
    return PoolState(64 * units, PrefixLru(), limits, board=board)


def slab_of(pool: PoolState, nbytes: int, lease_ns: int = FOREVER, now_ns: int = 0) -> SlabGrant:
    grant = pool.grant_slab(nbytes, owner="s", lease_ns=lease_ns, now_ns=now_ns)
    assert grant is not None
    return grant


def item(number: int, length: int = 64, tenant: str = "", parent: int | None = None) -> Reserve:
    return Reserve(KEYS[number], None if parent is None else KEYS[parent], 0 if parent is None else 16, length, tenant=tenant)


def put(pool: PoolState, *numbers: int) -> None:
    got = pool.reserve([item(number) for number in numbers], owner="w", lease_ns=10, now_ns=0)
    assert all(pool.commit(got.lease_id, [KEYS[number] for number in numbers], 0))


def test_divided_extent_is_several_that_are_freed_one_by_one() -> None:
    """What is cut off must be somebody's, and the rest stay somebody else's."""
    allocator = Allocator(640)
    assert allocator.allocate(256) == 0
    assert allocator.divide(0, [64, 192]) == [0, 64]
    assert allocator.extents() == [(0, 64), (64, 192)]
    allocator.check()
    allocator.free(0)
    allocator.check()
    assert allocator.divide(64, [128, 64]) == [64, 192]
    assert allocator.extents() == [(64, 128), (192, 64)]
    allocator.free(64)
    allocator.free(192)
    assert allocator.free_bytes == 640
    assert allocator.holes == 1
    allocator.check()


@pytest.mark.parametrize(
    ("offset", "sizes"), [(0, [0, 256]), (0, [64]), (0, [320]), (0, [65, 191]), (0, [320, -64]), (64, [64]), (256, [64]), (256, [384])]
)
def test_divide_into_what_the_extent_is_not_raises(offset: int, sizes: list[int]) -> None:
    """A wrong cut would corrupt the map of the arena."""
    allocator = Allocator(640)
    allocator.allocate(256)
    with pytest.raises(InvariantError, match="parts"):
        allocator.divide(offset, sizes)
    allocator.check()


def test_carve_publishes_in_order_and_keeps_the_rest() -> None:
    """The writer wrote one block behind the other; each is readable where it was written, the rest is still the writer's."""
    board = BoardTwin()
    pool = pool_of(10, board=board)
    slab = slab_of(pool, 500)
    assert slab == SlabGrant(lease_id=1, offset=0, nbytes=512)
    assert pool.books().pinned == 512
    assert pool.carve(slab.lease_id, [item(0, 100), item(1, parent=0)], 1, verified=False) == (Granted(0), Granted(128))
    assert [pool.locate(key) for key in KEYS[:2]] == [(0, 100), (128, 64)]
    assert [(record.offset, record.unverified) for record in board.records.values()] == [(0, True), (128, True)]
    assert not pool.leased_ranges(slab.lease_id, [(128, 64)], write=True)
    assert pool.leased_ranges(slab.lease_id, [(192, 320)], write=True)
    assert (pool.books().pinned, pool.books().used, pool.books().write_leases) == (320, 192, 1)
    assert pool.counters()["inserted"] == 2
    assert pool.coldest(64, 1) == [KEYS[1]]
    pool.check()
    assert pool.release(slab.lease_id, 2)
    assert pool.books().free == 640 - 192
    pool.check()


def test_carve_gives_back_what_exists_or_is_over_the_quota() -> None:
    """Each item's bytes are cut off in any case, so that later ones lie where the writer put them."""
    pool = pool_of(20)
    put(pool, 0)
    writing = pool.reserve([item(1)], owner="w", lease_ns=FOREVER, now_ns=0)
    pool.set_quota("t", 64)
    slab = slab_of(pool, 64 * 8)
    items = [item(0), item(1), item(2, tenant="t"), item(3, tenant="t", parent=2), item(4), item(4)]
    free = pool.books().free
    assert pool.carve(slab.lease_id, items, 0) == (EXISTS, EXISTS, Granted(256), NO_SPACE, Granted(384), EXISTS)
    assert pool.books().free == free + 4 * 64
    assert (pool.counters()["refused"], pool.counters()["refused_quota"]) == (1, 1)
    assert pool.quotas()["t"].used_bytes == 64
    pool.check()
    assert pool.commit(writing.lease_id, [KEYS[1]], 1) == (True,)


def test_carve_makes_room_among_the_blocks_of_a_tenant_at_its_quota() -> None:
    """As with `reserve`: a tenant at its quota goes on, by its own oldest blocks."""
    pool = pool_of(20)
    pool.set_quota("t", 128)
    slab = slab_of(pool, 64 * 4)
    assert pool.carve(slab.lease_id, [item(0, tenant="t"), item(1, tenant="t")], 0) == (Granted(0), Granted(64))
    assert pool.carve(slab.lease_id, [item(2, tenant="t")], 1) == (Granted(128),)
    assert len(pool.committed_keys()) == 2
    assert pool.counters()["evicted"] == 1
    pool.check()


def test_carve_at_max_blocks_evicts_then_answers_no_space() -> None:
    """The bound on blocks holds for small writers too, and at the bound the policy decides."""
    pool = pool_of(20, PoolLimits(max_blocks=2))
    put(pool, 0, 1)
    slab_lease = pool.grant_slab(64 * 4, owner="s", lease_ns=FOREVER, now_ns=0)
    assert slab_lease is not None
    grants = pool.carve(slab_lease.lease_id, [item(2), item(3), item(4)], 0)
    assert [isinstance(grant, Granted) for grant in grants] == [True, True, False]
    assert pool.counters()["evicted"] == 2
    pool.check()


def test_closed_carve_takes_nothing_in_and_moves_the_front_on() -> None:
    """A node that leaves; its writer goes on behind what it has said, and may be heard again."""
    pool = pool_of(10)
    put(pool, 0)
    pool.set_quota("t", 0)
    slab = slab_of(pool, 64 * 4)
    assert pool.carve(slab.lease_id, [item(0), item(1), item(2, tenant="t")], 0, closed=True) == (EXISTS, NO_SPACE, NO_SPACE)
    assert (pool.books().pinned, pool.books().free) == (64, 64 * 8)
    assert pool.carve(slab.lease_id, [item(1)], 0) == (Granted(slab.offset + 64 * 3),)
    assert pool.counters()["evicted"] == 0
    pool.check()


def test_carve_of_the_last_byte_ends_the_lease() -> None:
    """Nothing is left to hold, so the lease counts against no limit."""
    pool = pool_of(10, PoolLimits(max_leases=1))
    slab = slab_of(pool, 128)
    assert pool.grant_slab(64, owner="s", lease_ns=10, now_ns=0) is None
    assert pool.carve(slab.lease_id, [item(0, 65)], 0) == (Granted(0),)
    assert pool.books().write_leases == 0
    assert not pool.release(slab.lease_id, 0)
    pool.check()
    slab_of(pool, 64)


def test_carve_of_more_than_there_is_raises_and_changes_nothing() -> None:
    """Blocks that reach beyond a slab would be somebody else's bytes."""
    pool = pool_of(10)
    slab = slab_of(pool, 128)
    with pytest.raises(ConfigError, match="128 bytes that are left"):
        pool.carve(slab.lease_id, [item(0), item(1, 65)], 0)
    assert pool.committed_keys() == []
    assert pool.books().pinned == 128
    pool.check()


def test_carve_under_a_lease_that_has_ended_answers_no_space() -> None:
    """The bytes are somebody else's by now: a value, as for a late commit."""
    pool = pool_of(10)
    slab = slab_of(pool, 128, lease_ns=5)
    other = pool.reserve([item(5)], owner="w", lease_ns=FOREVER, now_ns=0)
    assert pool.carve(slab.lease_id, [item(0)], 5) == (NO_SPACE,)
    assert pool.carve(other.lease_id, [item(0)], 5) == (NO_SPACE,)
    assert pool.counters()["refused"] == 2
    pool.check()


def test_commit_under_a_slab_says_what_was_carved_and_ends_nothing() -> None:
    """A slab's lease has no reservations; taking that for a lease that is finished would lose its bytes."""
    pool = pool_of(10)
    slab = slab_of(pool, 128)
    pool.carve(slab.lease_id, [item(0)], 0)
    assert pool.commit(slab.lease_id, KEYS[:2], 0) == (True, False)
    assert pool.leased_ranges(slab.lease_id, [(64, 64)], write=True)
    assert pool.writers() == set()
    pool.check()


def test_slab_evicts_and_stays_where_it_is() -> None:
    """A slab is made room for like a block, and is never itself moved or evicted."""
    pool = pool_of(8)
    put(pool, 0, 1, 2, 3, 4, 5, 6, 7)
    slab = slab_of(pool, 128)
    assert pool.counters()["evicted"] == 2
    for number in (0, 1, 2, 3, 4, 5, 6, 7):
        pool.discard(KEYS[number])
    assert pool.grant_slab(64 * 7, owner="s", lease_ns=10, now_ns=0) is None
    assert pool.leased_ranges(slab.lease_id, [(slab.offset, 128)], write=True)
    assert pool.counters()["refused"] == 1
    pool.check()


def test_carved_blocks_are_dirty_while_a_slower_tier_is_to_have_them() -> None:
    """As with `commit`: what isn't written down yet doesn't leave."""
    pool = pool_of(4)
    pool.guard(True)
    slab = slab_of(pool, 256)
    pool.carve(slab.lease_id, [item(0, 256)], 0)
    answer = pool.reserve([item(1)], owner="w", lease_ns=10, now_ns=0)
    assert (answer.grants, answer.waiting) == ((NO_SPACE,), True)
    pool.mark([KEYS[0]], dirty=False)
    assert isinstance(pool.reserve([item(1)], owner="w", lease_ns=10, now_ns=0).grants[0], Granted)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_slab_without_bytes_raises(nbytes: int) -> None:
    """A slab of nothing could never be used up."""
    with pytest.raises(ConfigError, match="at least one byte"):
        pool_of(4).grant_slab(nbytes, owner="s", lease_ns=10, now_ns=0)
