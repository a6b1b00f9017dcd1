"""Pins, quotas and passing blocks: who stays and who goes when room is needed."""

from hashlib import sha256
from typing import Any

import pytest

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.eviction import PrefixLru, make_policy
from kvpool.pool import NO_SPACE, Granted, PinOutcome, PoolLimits, PoolState, Quota, Reserve

SIZE = 64


def key(name: str) -> BlockKey:
    return BlockKey(sha256(name.encode()).digest())


def pool_of(blocks: int, limits: PoolLimits | None = None) -> PoolState:
    return PoolState(blocks * SIZE, PrefixLru(), limits)


def put(pool: PoolState, *names: str, now: int = 0, passing: bool = False, **fields: Any) -> list[bool]:
    """Put single blocks one after the other; which got room."""
    done: list[bool] = []
    for name in names:
        item = Reserve(key(name), None, 0, SIZE)._replace(**fields)
        got = pool.reserve([item], owner="w", lease_ns=100, now_ns=now)
        done.append(isinstance(got.grants[0], Granted))
        pool.commit(got.lease_id, [key(name)], now, passing=passing)
    pool.check()
    return done


def there(pool: PoolState, *names: str) -> list[bool]:
    return [pool.locate(key(name)) is not None for name in names]


def pin(pool: PoolState, name: str, *, owner: str = "o", hard: bool = False, duration: int = 50, now: int = 0) -> PinOutcome:
    (outcome,) = pool.pin([key(name)], owner=owner, hard=hard, duration_ns=duration, now_ns=now)
    pool.check()
    return outcome


def test_softly_pinned_block_leaves_last_but_leaves() -> None:
    """A soft pin is a wish: it never makes a pool refuse."""
    pool = pool_of(3)
    put(pool, "old", "mid", "new")
    assert pin(pool, "old") is PinOutcome.PINNED
    put(pool, "a", "b")
    assert there(pool, "old", "mid", "new", "a", "b") == [True, False, False, True, True]
    pool.acquire([key("a"), key("b")], owner="r", lease_ns=100, now_ns=1)
    assert put(pool, "c", now=1) == [True]
    assert there(pool, "old") == [False]


def test_hard_pin_keeps_its_block_until_its_deadline() -> None:
    """Not longer: what nobody unpins comes back by itself."""
    pool = pool_of(2)
    put(pool, "kept", "other")
    assert pin(pool, "kept", hard=True, duration=10) is PinOutcome.PINNED
    assert put(pool, "a", "b", now=9) == [True, True]
    assert there(pool, "kept") == [True]
    assert pool.books().pinned == SIZE
    assert put(pool, "c", "d", now=10) == [True, True]
    assert there(pool, "kept") == [False]


def test_hard_pins_hold_at_most_their_share() -> None:
    """Pins must not stop a pool from working."""
    pool = pool_of(4)
    put(pool, "a", "b", "c")
    assert [pin(pool, name, hard=True) for name in "abc"] == [PinOutcome.PINNED, PinOutcome.PINNED, PinOutcome.REFUSED]
    assert pin(pool, "a", owner="second", hard=True) is PinOutcome.PINNED  # holds no more bytes than the first
    assert pin(pool, "c") is PinOutcome.PINNED
    assert pin(pool, "none") is PinOutcome.ABSENT


def test_number_of_pins_is_bounded() -> None:
    """A client that pins without end meets a limit, not the node's memory."""
    pool = pool_of(4, PoolLimits(max_pins=2))
    put(pool, "a", "b", "c")
    assert [pin(pool, name) for name in "abc"] == [PinOutcome.PINNED, PinOutcome.PINNED, PinOutcome.REFUSED]
    assert pin(pool, "a", duration=90) is PinOutcome.PINNED


def test_pin_of_one_owner_outlives_that_of_another() -> None:
    """Two jobs that pin one prefix don't end each other's pin."""
    pool = pool_of(2)
    put(pool, "kept", "other")
    pin(pool, "kept", owner="a", hard=True)
    pin(pool, "kept", owner="b", hard=True)
    assert pool.unpin([key("kept"), key("none")], owner="a", now_ns=0) == 1
    assert pool.unpin([key("kept")], owner="a", now_ns=0) == 0
    put(pool, "x", "y")
    assert there(pool, "kept") == [True]
    assert pool.unpin([key("kept")], owner="b", now_ns=0) == 1
    put(pool, "x2", "y2")
    assert there(pool, "kept") == [False]


def test_ttl_waits_for_a_hard_pin_and_not_for_a_soft_one() -> None:
    """A ttl says when a block is unwanted; a hard pin says that somebody relies on it until then."""
    pool = pool_of(4)
    put(pool, "hard", "soft", ttl_ns=10)
    pin(pool, "hard", hard=True, duration=30)
    pin(pool, "soft", duration=30)
    pool.tick(15)
    assert there(pool, "hard", "soft") == [True, False]
    pool.tick(30)
    assert there(pool, "hard") == [False]
    pool.check()


def test_corrupt_block_goes_whatever_pins_it() -> None:
    """A pin keeps a block, not its damage."""
    pool = pool_of(2)
    put(pool, "bad")
    pin(pool, "bad", hard=True)
    assert pool.discard(key("bad"))
    pool.check()
    assert pool.books().free == 2 * SIZE
    assert put(pool, "bad", "other") == [True, True]
    assert put(pool, "third") == [True]


def test_tenant_at_its_quota_makes_room_among_its_own() -> None:
    """One tenant's flood costs no other tenant a block."""
    pool = pool_of(8)
    pool.set_quota("small", 2 * SIZE)
    put(pool, "theirs1", "theirs2", tenant="big")
    put(pool, "a", "b", tenant="small")
    assert put(pool, "c", tenant="small") == [True]
    assert there(pool, "theirs1", "theirs2", "a", "b", "c") == [True, True, False, True, True]
    assert pool.quotas() == {"big": Quota(2 * SIZE, None), "small": Quota(2 * SIZE, 2 * SIZE)}


def test_item_over_the_whole_quota_is_refused_and_counted() -> None:
    """Evicting all of a tenant's blocks for one that can't fit would be the worst of both."""
    pool = pool_of(8)
    pool.set_quota("t", SIZE)
    got = pool.reserve([Reserve(key("big"), None, 0, 2 * SIZE, tenant="t")], owner="w", lease_ns=10, now_ns=0)
    assert got.grants == (NO_SPACE,)
    assert pool.counters()["refused_quota"] == 1
    pool.set_quota("t", None)
    assert put(pool, "big", tenant="t", length=2 * SIZE) == [True]


def test_quotas_are_checked_and_bounded() -> None:
    """Bad input is told at the edge."""
    pool = pool_of(2, PoolLimits(max_quotas=1))
    pool.set_quota("a", 5)
    for tenant, value in (("b", 5), ("a", -1), ("x" * 300, 5)):
        with pytest.raises(ConfigError):
            pool.set_quota(tenant, value)


def test_passing_blocks_leave_first_until_they_come_back() -> None:
    """A scan over the slow tier passes through its own room; what is admitted counts like the rest."""
    pool = pool_of(4)
    put(pool, "work1", "work2")
    put(pool, "scan1", "scan2", passing=True)
    pool.admit([key("scan1"), key("none")], 0)
    put(pool, "scan3", passing=True)
    assert there(pool, "work1", "work2", "scan1", "scan2", "scan3") == [True, True, True, False, True]
    put(pool, "new")
    assert there(pool, "work1", "work2", "scan1", "scan3", "new") == [True, True, True, False, True]


def test_priority_reaches_the_policy_with_its_end() -> None:
    """A range of tokens marked as worth keeping stays longer, and no longer than its duration."""
    pool = PoolState(2 * SIZE, make_policy("priority"))
    put(pool, "keep", priority=90, priority_ns=10)
    put(pool, "dull", now=1)
    put(pool, "x", now=2)
    assert there(pool, "keep", "dull") == [True, False]
    put(pool, "y", now=20)
    put(pool, "z", now=21)
    assert there(pool, "keep") == [False]


def test_time_that_goes_back_changes_nothing() -> None:
    """A clock that jumps back neither revives a lease nor postpones an end."""
    pool = pool_of(2)
    put(pool, "a", now=100, ttl_ns=50)
    pool.tick(160)
    assert there(pool, "a") == [False]
    put(pool, "b", now=10, ttl_ns=50)
    pool.tick(200)
    assert there(pool, "b") == [True]
    pool.tick(210)
    assert there(pool, "b") == [False]


def test_view_tells_all_about_a_block() -> None:
    """What an operator is shown is what the pool acts on."""
    pool = pool_of(4)
    put(pool, "a", now=5, tenant="t", priority=70, sequence=640, ttl_ns=100)
    pin(pool, "a", hard=True, now=6)
    lease = pool.acquire([key("a")], owner="reader", lease_ns=40, now_ns=7)
    view = pool.view(key("a"), holders=True)
    assert view is not None
    assert (view.tenant, view.priority, view.sequence, view.hits, view.expires_ns) == ("t", 70, 640, 1, 105)
    assert (view.committed_ns, view.used_ns, view.size, view.dirty) == (5, 7, SIZE, False)
    assert [(one.owner, one.hard, one.deadline_ns) for one in view.pins] == [("o", True, 56)]
    assert [(one.lease_id, one.owner, one.write, one.deadline_ns) for one in view.holders] == [(lease.lease_id, "reader", False, 47)]
    assert pool.view(key("none")) is None
