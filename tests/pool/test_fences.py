"""The fence: bytes whose writer may still write are nobody else's until it is over."""

from hashlib import sha256

import pytest

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import NO_SPACE, Granted, PoolLimits, PoolState, Reserve

KEYS = [BlockKey(sha256(b"%d" % i).digest()) for i in range(4)]
FENCE = 100


def pool_of(fence_ns: int = FENCE) -> PoolState:
    return PoolState(64 * 4, PrefixLru(), PoolLimits(fence_ns=fence_ns))


def reserve(pool: PoolState, key: BlockKey, now_ns: int, length: int = 128, lease_ns: int = 10) -> tuple[int, object]:
    got = pool.reserve([Reserve(key, None, 0, length)], owner="w", lease_ns=lease_ns, now_ns=now_ns)
    return got.lease_id, got.grants[0]


def test_lease_that_ran_out_keeps_its_bytes_for_the_fence() -> None:
    """The key is free at once, the bytes are not: their writer may have a transfer on its way."""
    pool = pool_of()
    lease, _ = reserve(pool, KEYS[0], 0)
    assert pool.tick(10) == 1
    assert pool.commit(lease, [KEYS[0]], 10) == (False,)
    assert pool.books().pinned == 128
    assert not pool.writing(KEYS[0])
    assert pool.next_due_ns() == 10 + FENCE
    pool.check()
    assert reserve(pool, KEYS[0], 11)[1] == Granted(128)
    assert reserve(pool, KEYS[1], 11)[1] is NO_SPACE
    pool.check()
    assert pool.release(2, 12)
    assert reserve(pool, KEYS[1], 109, 256)[1] is NO_SPACE
    assert reserve(pool, KEYS[1], 110, 256)[1] == Granted(0)
    pool.check()


def test_fence_begins_when_the_end_of_the_lease_is_noticed() -> None:
    """Node and writer may have stood still together; when they go on, the writer does in the middle of its copy."""
    pool = pool_of()
    reserve(pool, KEYS[0], 0)
    pool.tick(50 * FENCE)
    assert pool.books().pinned == 128
    assert pool.next_due_ns() == 51 * FENCE
    pool.check()
    pool.tick(51 * FENCE)
    assert pool.books().pinned == 0
    pool.check()


def test_lease_that_is_released_gives_its_bytes_back_at_once() -> None:
    """Its writer says that it has stopped."""
    pool = pool_of()
    lease, _ = reserve(pool, KEYS[0], 0)
    assert pool.release(lease, 5)
    assert pool.books().free == 256
    pool.check()


def test_block_discarded_under_its_writer_is_fenced_when_the_lease_runs_out() -> None:
    """A discard doesn't stop a writer."""
    pool = pool_of()
    reserve(pool, KEYS[0], 0)
    assert pool.discard(KEYS[0])
    pool.tick(10)
    assert pool.books().pinned == 128
    pool.check()
    pool.tick(10 + FENCE)
    assert pool.books().free == 256
    pool.check()


def test_slab_whose_lease_runs_out_is_fenced() -> None:
    """All of it: the writer may have been anywhere in it."""
    pool = pool_of()
    slab = pool.grant_slab(192, owner="s", lease_ns=10, now_ns=0)
    assert slab is not None
    pool.carve(slab.lease_id, [Reserve(KEYS[0], None, 0, 64)], 0)
    pool.tick(10)
    assert (pool.books().pinned, pool.books().used) == (128, 64)
    pool.check()
    pool.tick(9 + FENCE)
    assert pool.books().pinned == 128
    pool.tick(10 + FENCE)
    assert pool.books().pinned == 0
    pool.check()


def test_read_lease_that_runs_out_leaves_no_fence() -> None:
    """A reader harms nobody but itself."""
    pool = pool_of()
    lease, _ = reserve(pool, KEYS[0], 0)
    pool.commit(lease, [KEYS[0]], 0)
    pool.acquire([KEYS[0]], owner="r", lease_ns=10, now_ns=0)
    pool.tick(10)
    assert pool.books().pinned == 0
    assert pool.next_due_ns() is None


def test_without_a_fence_bytes_go_back_when_the_lease_runs_out() -> None:
    """The default of the pure core."""
    pool = pool_of(0)
    reserve(pool, KEYS[0], 0)
    pool.tick(10)
    assert pool.books().free == 256
    pool.check()


def test_negative_fence_raises() -> None:
    """Bytes can't be given away before the lease is over."""
    with pytest.raises(ConfigError, match="fence_ns must not be negative"):
        PoolLimits(fence_ns=-1)
