"""Limits: each one has a behaviour, and it happens."""

from hashlib import sha256

import pytest

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import EXISTS, NO_SPACE, Granted, PoolLimits, PoolState, Reserve

KEYS = [BlockKey(sha256(b"%d" % i).digest()) for i in range(10)]


def pool_of(limits: PoolLimits, blocks: int = 0) -> PoolState:
    pool = PoolState(64 * 10, PrefixLru(), limits)
    if blocks:
        reserved = pool.reserve([Reserve(key, None, 0, 64) for key in KEYS[:blocks]], owner="w", lease_ns=10, now_ns=0)
        assert all(pool.commit(reserved.lease_id, KEYS[:blocks], 0))
    return pool


def test_limits_must_be_positive() -> None:
    """A limit of zero is a pool that can't work."""
    with pytest.raises(ConfigError, match="max_leases"):
        PoolLimits(max_leases=0)


def test_max_leases_reached_answers_misses_and_no_space() -> None:
    """A client that never releases makes others miss, not fail, and only until its deadline."""
    pool = pool_of(PoolLimits(max_leases=1), blocks=2)
    first = pool.acquire(KEYS[:1], owner="r", lease_ns=10, now_ns=1)
    assert first.lease_id
    refused = pool.acquire(KEYS[:2], owner="r", lease_ns=10, now_ns=2)
    assert (refused.lease_id, refused.found) == (0, (None, None))
    items = [Reserve(KEYS[0], None, 0, 64), Reserve(KEYS[5], None, 0, 64)]
    assert pool.reserve(items, owner="w", lease_ns=10, now_ns=3).grants == (EXISTS, NO_SPACE)
    assert pool.counters()["refused"] == 3
    pool.check()
    assert pool.acquire(KEYS[:2], owner="r", lease_ns=10, now_ns=11).lease_id


def test_max_leased_blocks_reached_answers_misses() -> None:
    """The memory of leases is bounded whatever their number; what is given back can be leased again."""
    pool = pool_of(PoolLimits(max_leased_blocks=3), blocks=3)
    first = pool.acquire(KEYS[:2], owner="r", lease_ns=10, now_ns=1)
    assert pool.acquire(KEYS[:2], owner="r", lease_ns=10, now_ns=1).found == (None, None)
    assert pool.acquire(KEYS[:1], owner="r", lease_ns=10, now_ns=1).lease_id
    assert pool.release(first.lease_id, 2)
    assert pool.acquire(KEYS[:2], owner="r", lease_ns=10, now_ns=2).lease_id
    pool.check()


def test_max_blocks_per_call_exceeded_raises_and_changes_nothing() -> None:
    """A call too long is the caller's mistake, told before anything happens."""
    pool = pool_of(PoolLimits(max_blocks_per_call=2))
    with pytest.raises(ConfigError, match="split"):
        pool.reserve([Reserve(key, None, 0, 64) for key in KEYS[:3]], owner="w", lease_ns=10, now_ns=0)
    for call in (
        lambda: pool.acquire(KEYS[:3], owner="r", lease_ns=10, now_ns=0),
        lambda: pool.lookup(KEYS[:3], 0),
        lambda: pool.commit(1, KEYS[:3], 0),
        lambda: pool.leased_ranges(1, [(0, 1)] * 3),
    ):
        with pytest.raises(ConfigError, match="split"):
            call()
    assert pool.books().free == 640


def test_max_lease_ns_cuts_longer_asks() -> None:
    """Nobody holds bytes forever, by acquire or by renew."""
    pool = pool_of(PoolLimits(max_lease_ns=100), blocks=1)
    lease = pool.acquire(KEYS[:1], owner="r", lease_ns=10**12, now_ns=0).lease_id
    assert pool.next_due_ns() == 100
    assert pool.renew(lease, 10**12, 50)
    assert pool.next_due_ns() == 150
    assert not pool.renew(lease, 10**12, 150)


def test_max_blocks_reached_evicts_then_answers_no_space() -> None:
    """Metadata is bounded even where blocks are tiny, and at the bound the policy decides."""
    pool = pool_of(PoolLimits(max_blocks=2), blocks=2)
    grants = pool.reserve([Reserve(key, None, 0, 64) for key in KEYS[2:5]], owner="w", lease_ns=10, now_ns=0).grants
    assert [isinstance(grant, Granted) for grant in grants] == [True, True, False]
    assert pool.counters()["evicted"] == 2
    pool.check()


def test_owner_name_too_long_raises() -> None:
    """A lease's owner is for people reading a status page, not for storage."""
    pool = pool_of(PoolLimits(max_owner_chars=4))
    with pytest.raises(ConfigError, match="owner"):
        pool.acquire(KEYS[:1], owner="12345", lease_ns=10, now_ns=0)


@pytest.mark.parametrize(
    "item",
    [
        Reserve(BlockKey(b"short"), None, 0, 64),
        Reserve(KEYS[0], BlockKey(b"short"), 16, 64),
        Reserve(KEYS[0], KEYS[0], 16, 64),
        Reserve(KEYS[0], None, 0, 0),
        Reserve(KEYS[0], None, -1, 64),
        Reserve(KEYS[0], None, 0, 64, -1),
    ],
)
def test_reserve_of_a_senseless_item_raises_and_changes_nothing(item: Reserve) -> None:
    """Bad input is refused whole, so a good item before it is not left reserved."""
    pool = pool_of(PoolLimits())
    with pytest.raises(ConfigError):
        pool.reserve([Reserve(KEYS[1], None, 0, 64), item], owner="w", lease_ns=10, now_ns=0)
    assert pool.books().pinned == 0


@pytest.mark.parametrize("lease_ns", [0, -1])
def test_lease_without_duration_raises(lease_ns: int) -> None:
    """A lease that has ended before it began protects nothing."""
    pool = pool_of(PoolLimits())
    with pytest.raises(ConfigError, match="lease_ns"):
        pool.acquire(KEYS[:1], owner="r", lease_ns=lease_ns, now_ns=0)
    with pytest.raises(ConfigError, match="lease_ns"):
        pool.renew(1, lease_ns, 0)
