"""Near copies: beside the pool's own blocks, at nobody's expense, the first to leave."""

from hashlib import sha256

from kvpool.block import BlockKey
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import EXISTS, Granted, PoolState, Reserve, Reserved
from kvpool.pool.values import NEAR

SIZE = 64


def key(name: str) -> BlockKey:
    return BlockKey(sha256(name.encode()).digest())


def pool_of(blocks: int) -> PoolState:
    return PoolState(blocks * SIZE, PrefixLru())


def put(pool: PoolState, *names: str, near: bool = False, tenant: str = "", now_ns: int = 1) -> Reserved:
    items = [Reserve(key(name), None, 0, SIZE, tenant=tenant, near=near) for name in names]
    answer = pool.reserve(items, owner="w", lease_ns=10**9, now_ns=now_ns)
    granted = [item.key for item, grant in zip(items, answer.grants, strict=True) if isinstance(grant, Granted)]
    if granted:
        assert all(pool.commit(answer.lease_id, granted, now_ns))
    pool.check()
    return answer


def test_near_copies_leave_before_anything_else_however_new_or_used() -> None:
    """They are convenient, not needed: a block of the pool's own never leaves for one that could go instead."""
    pool = pool_of(4)
    put(pool, "old", "older")
    put(pool, "near1", "near2", near=True, now_ns=2)
    pool.acquire([key("near1"), key("near2")], owner="r", lease_ns=1, now_ns=3)
    pool.admit([key("near1"), key("near2")], 5)
    put(pool, "new1", "new2", now_ns=10)
    assert pool.lookup([key("old"), key("older"), key("new1"), key("new2"), key("near1"), key("near2")], 10) == b"\1\1\1\1\0\0"


def test_near_copies_count_against_no_quota_and_make_no_tenant_leave() -> None:
    """Where readers happen to sit must not cost a tenant its room."""
    pool = pool_of(8)
    pool.set_quota("t", 2 * SIZE)
    put(pool, "a", "b", tenant="t")
    put(pool, "c", "d", near=True, tenant="t")
    assert pool.quotas()["t"].used_bytes == 2 * SIZE
    assert pool.lookup([key(name) for name in "abcd"], 1) == bytes((1, 1, NEAR, NEAR))
    put(pool, "e", tenant="t")
    assert pool.quotas()["t"].used_bytes == 2 * SIZE
    assert pool.lookup([key("c"), key("d"), key("e")], 1) == bytes((NEAR, NEAR, 1))


def test_adopted_near_copy_is_a_block_like_any_other() -> None:
    """The node has become one of its owners: now it counts, and leaves in its turn."""
    pool = pool_of(4)
    put(pool, "a", near=True, tenant="t")
    assert pool.adopt([key("a"), key("b")], 2) == [key("a")]
    assert pool.adopt([key("a")], 2) == []
    assert pool.quotas()["t"].used_bytes == SIZE
    assert pool.lookup([key("a")], 2) == b"\1"
    pool.check()
    pool.discard(key("a"))
    assert pool.quotas() == {}
    pool.check()


def test_near_copy_is_never_dirty_and_an_adopted_one_is() -> None:
    """Nothing waits for a near copy to be written down; a block that the node answers for is kept until it is."""
    pool = pool_of(2)
    pool.guard(True)
    put(pool, "n", near=True)
    assert pool.coldest(10 * SIZE, 2) == []
    pool.mark([key("n")], dirty=True)
    view = pool.view(key("n"))
    assert view is not None
    assert (view.near, view.dirty) == (True, False)
    pool.adopt([key("n")], 2)
    view = pool.view(key("n"))
    assert view is not None
    assert (view.near, view.dirty) == (False, True)
    pool.check()


def test_near_copies_survive_every_end_of_a_block_with_balanced_books() -> None:
    """Leased, discarded, expired, abandoned, replaced by the real block: the tenant's account never moves for them."""
    pool = pool_of(8)
    pool.set_quota("t", 10 * SIZE)
    put(pool, "a", "b", near=True, tenant="t")
    lease = pool.acquire([key("a")], owner="r", lease_ns=100, now_ns=2).lease_id
    pool.discard(key("a"))
    pool.check()
    put(pool, "a", tenant="t", now_ns=3)
    assert pool.release(lease, 4)
    pool.check()
    abandoned = pool.reserve([Reserve(key("c"), None, 0, SIZE, tenant="t", near=True)], owner="w", lease_ns=10, now_ns=5)
    pool.release(abandoned.lease_id, 6)
    pool.check()
    short = pool.reserve([Reserve(key("d"), None, 0, SIZE, 10, tenant="t", near=True)], owner="w", lease_ns=10, now_ns=7)
    pool.commit(short.lease_id, [key("d")], 7)
    pool.tick(50)
    pool.check()
    assert put(pool, "b", tenant="t", now_ns=60).grants == (EXISTS,)
    assert pool.quotas()["t"].used_bytes == SIZE
