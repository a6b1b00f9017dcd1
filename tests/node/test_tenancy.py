"""What a tenant sees of a node: its own blocks, and nothing that tells of others'."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool.block import BlockKey
from kvpool.clock import MonotonicClock
from kvpool.errors import AccessError, ConfigError, LimitError
from kvpool.node.admin import NodeAdmin
from kvpool.node.tenancy import TenantPool, owners_in
from kvpool.policy.rates import Rates, TenantLimits
from kvpool.pool import PoolState
from kvpool.request.pool import Outcome, Reservation, ShmOffer, TcpOffer
from kvpool.security.principal import Principal, Right
from kvpool.security.tenants import TenantBook
from kvpool.wire.auth import called_by
from tests.node.conftest import FRAMER, LENGTH, SIZE, Rig, Rigs, chain, until

USER = frozenset({Right.READ, Right.WRITE})
ALICE = Principal(name="alice", tenant="a", rights=USER)
BOB = Principal(name="bob", tenant="b", rights=USER)
WORKER = Principal(name="w", rights=frozenset({Right.READ, Right.WRITE, Right.MAP, Right.WORKER}))
CHAIN = chain("x", 3)


def guarded(rig: Rig, rates: Rates | None = None) -> TenantPool:
    return TenantPool(rig.handler, owners_in(rig.state, rig.tiers), MonotonicClock(), rates)


async def reserve(pool: TenantPool, keys: Sequence[BlockKey], *, tenant: str = "", near: bool = False) -> tuple[int, list[Outcome]]:
    blocks = [Reservation(key, keys[i - 1] if i else b"", 16 * i, LENGTH) for i, key in enumerate(keys)]
    lease_id, grants = await pool.reserve("o", 10_000, blocks, sequence=0, tenant=tenant, near=near, patience_s=1.0)
    return lease_id, [outcome for outcome, _ in grants]


async def acquire(pool: TenantPool, keys: Sequence[BlockKey]) -> tuple[int, list[bool]]:
    lease_id, places = await pool.acquire("o", 10_000, keys, sequence=0, patience_s=1.0, fetch_from=())
    return lease_id, [place is not None for place in places]


async def put(pool: TenantPool, keys: Sequence[BlockKey], rig: Rig) -> list[Outcome]:
    """Reserve, write, commit; the outcomes."""
    blocks = [Reservation(key, keys[i - 1] if i else b"", 16 * i, LENGTH) for i, key in enumerate(keys)]
    lease_id, grants = await pool.reserve("o", 10_000, blocks, sequence=0, tenant="", near=False, patience_s=1.0)
    for i, (key, (outcome, offset)) in enumerate(zip(keys, grants, strict=True)):
        if outcome is Outcome.GRANTED:
            frame = pool.window(lease_id, offset, LENGTH, write=True)
            frame[:] = key[0]
            FRAMER.stamp(frame, key, keys[i - 1] if i else FRAMER.root, 16)
    granted = [key for key, (outcome, _) in zip(keys, grants, strict=True) if outcome is Outcome.GRANTED]
    assert all(pool.commit(lease_id, granted))
    return [outcome for outcome, _ in grants]


async def test_block_of_another_tenant_is_absent_in_every_call(rigs: Rigs) -> None:
    """No hit, no EXISTS, no overwriting; its owner finds it unharmed."""
    rig = rigs(8)
    pool = guarded(rig)
    with called_by(ALICE):
        assert await put(pool, CHAIN, rig) == [Outcome.GRANTED] * 3
        assert pool.lookup(CHAIN) == b"\1\1\1"
    with called_by(BOB):
        assert pool.lookup(CHAIN) == b"\0\0\0"
        assert await acquire(pool, CHAIN) == (0, [False] * 3)
        assert await reserve(pool, CHAIN) == (0, [Outcome.NO_SPACE] * 3)
        mixed = [CHAIN[0], chain("y", 1)[0]]
        lease_id, outcomes = await reserve(pool, mixed)
        assert outcomes == [Outcome.NO_SPACE, Outcome.GRANTED]
        pool.release(lease_id, ())
    with called_by(ALICE):
        lease_id, hits = await acquire(pool, CHAIN)
        assert hits == [True] * 3
        pool.release(lease_id, ())
        assert (await reserve(pool, CHAIN))[1] == [Outcome.EXISTS] * 3


async def test_block_being_written_exists_for_its_tenant_only(rigs: Rigs) -> None:
    """Also before its commit a key must not tell that somebody has it."""
    pool = guarded(rigs(8))
    with called_by(ALICE):
        lease_id, outcomes = await reserve(pool, CHAIN)
        assert outcomes == [Outcome.GRANTED] * 3
        assert (await reserve(pool, CHAIN))[1] == [Outcome.EXISTS] * 3
    with called_by(BOB):
        assert (await reserve(pool, CHAIN))[1] == [Outcome.NO_SPACE] * 3
    with called_by(ALICE):
        pool.release(lease_id, ())
    with called_by(BOB):
        assert (await reserve(pool, CHAIN))[1] == [Outcome.GRANTED] * 3


async def test_block_on_a_slower_tier_is_absent_too(rigs: Rigs) -> None:
    """Tenants are kept with the records."""
    rig = rigs(2, below=8)
    pool = guarded(rig)
    with called_by(ALICE):
        await put(pool, CHAIN[:2], rig)
        assert rig.below is not None
        await until(lambda: rig.below is not None and all(rig.below.find(CHAIN[:2])))
        rig.state.discard(CHAIN[0])
        rig.state.discard(CHAIN[1])
        assert pool.lookup(CHAIN[:2]) == b"\3\3"
    with called_by(BOB):
        assert pool.lookup(CHAIN[:2]) == b"\0\0"
        assert await acquire(pool, CHAIN[:2]) == (0, [False] * 2)
        assert (await reserve(pool, CHAIN[:2]))[1] == [Outcome.NO_SPACE] * 2


async def test_lease_of_another_tenant_means_nothing(rigs: Rigs) -> None:
    """Lease numbers are easy to guess: they must open nothing."""
    rig = rigs(8)
    pool = guarded(rig)
    with called_by(ALICE):
        await put(pool, CHAIN, rig)
        reading, _ = await acquire(pool, CHAIN)
        writing, _ = await reserve(pool, chain("z", 1))
    offset, length = rig.state.locate(CHAIN[0]) or (0, 0)
    with called_by(BOB):
        with pytest.raises(ConfigError, match="not covered"):
            pool.window(reading, offset, length, write=False)
        with pytest.raises(ConfigError, match="not covered"):
            pool.window(writing, 0, 1, write=True)
        assert not pool.renew(reading, 1000)
        assert pool.commit(writing, chain("z", 1)) == [False]
        pool.release(reading, CHAIN)
        pool.release(writing, ())
    with called_by(ALICE):
        assert pool.renew(reading, 1000)
        assert pool.window(reading, offset, length, write=False).size == length
        assert pool.commit(writing, chain("z", 1)) == [True]


async def test_tenant_writes_in_its_own_name_and_no_near_copies(rigs: Rigs) -> None:
    """Near copies count against no quota, and another name against another's."""
    rig = rigs(8)
    pool = guarded(rig)
    with called_by(ALICE):
        with pytest.raises(AccessError, match="not for another"):
            await reserve(pool, CHAIN, tenant="b")
        with pytest.raises(AccessError, match="near"):
            await reserve(pool, CHAIN, near=True)
        with pytest.raises(AccessError):
            pool.stored(CHAIN)
        await put(pool, CHAIN, rig)
    assert set(rig.state.quotas()) == {"a"}


async def test_quota_holds_whatever_tenant_the_call_names(rigs: Rigs) -> None:
    """It is enforced on who asks."""
    rig = rigs(8)
    rig.state.set_quota("a", 2 * SIZE)
    with called_by(ALICE):
        outcomes = (await reserve(guarded(rig), CHAIN))[1]
    assert outcomes == [Outcome.GRANTED, Outcome.GRANTED, Outcome.NO_SPACE]


async def test_offers_that_open_the_whole_arena_need_the_right(rigs: Rigs) -> None:
    """And a tenant sees no books: they tell what others do."""
    rig = rigs(8)
    rig.handler.shm = ShmOffer(path="/x", boot_id="y")
    rig.handler.tcp = lambda: TcpOffer(address="127.0.0.1:1")
    pool = guarded(rig)
    assert pool.describe().shm is not None  # an open node
    with called_by(WORKER):
        assert (pool.describe().shm, pool.describe().tcp) == (rig.handler.shm, TcpOffer(address="127.0.0.1:1"))
    with called_by(Principal(name="reader", rights=frozenset({Right.READ}))):
        assert (pool.describe().shm, pool.describe().tcp) == (None, None)
        assert pool.describe().free_bytes > 0
    with called_by(ALICE):
        seen = pool.describe()
        assert (seen.shm, seen.ucx, seen.tcp) == (None, None, None)
        assert (seen.blocks, seen.used_bytes, seen.free_bytes, seen.counters) == (0, 0, 0, {})
        assert seen.capacity_bytes == rig.state.books().capacity


async def test_worker_speaks_for_any_tenant(rigs: Rigs) -> None:
    """The router tells it whose the request is."""
    rig = rigs(8)
    pool = guarded(rig)
    with called_by(WORKER):
        lease_id, _ = await reserve(pool, CHAIN, tenant="a")
        assert all(pool.commit(lease_id, CHAIN))
    with called_by(ALICE):
        assert pool.lookup(CHAIN) == b"\1\1\1"
    with called_by(BOB):
        assert pool.lookup(CHAIN) == b"\0\0\0"


async def test_only_the_deployment_speaks_for_tenants(rigs: Rigs) -> None:
    """Who is bound to no tenant writes for nobody: not into a tenant's name and quota, no near copies past every quota."""
    pool = guarded(rigs(8))
    with called_by(Principal(name="loose", rights=USER)):
        with pytest.raises(AccessError, match="worker"):
            await reserve(pool, CHAIN, tenant="a")
        with pytest.raises(AccessError, match="worker"):
            await reserve(pool, CHAIN, near=True)
        with pytest.raises(AccessError):
            pool.stored(CHAIN)
        lease_id, outcomes = await reserve(pool, CHAIN)
        assert outcomes == [Outcome.GRANTED] * 3
        pool.release(lease_id, ())


@pytest.mark.parametrize("write", [False, True])
async def test_lease_moves_no_more_bytes_than_were_paid_for(rigs: Rigs, write: bool) -> None:
    """Or one lease, read again and again, would go past every rate. A range may be repeated once."""
    rig = rigs(8)
    pool = guarded(rig)
    with called_by(ALICE):
        await put(pool, CHAIN[:2], rig)
        if write:
            blocks = [Reservation(CHAIN[2], CHAIN[1], 32, LENGTH)]
            lease_id, places = await pool.reserve("o", 10_000, blocks, sequence=0, tenant="", near=False, patience_s=1.0)
            offset = places[0][1]
        else:
            lease_id, found = await pool.acquire("o", 10_000, CHAIN[:1], sequence=0, patience_s=1.0, fetch_from=())
            assert found[0] is not None
            offset = found[0][0]
        for _ in range(2):
            assert pool.window(lease_id, offset, LENGTH, write=write).size == LENGTH
        with pytest.raises(LimitError):
            pool.window(lease_id, offset, 1, write=write)
        pool.release(lease_id, ())


async def test_bytes_count_against_the_rate_of_the_tenant(rigs: Rigs) -> None:
    """Read or written, by what was leased."""
    rig = rigs(8)
    rates = Rates(lambda tenant: TenantLimits(bytes_per_s=1.0))
    pool, clock = guarded(rig, rates), MonotonicClock()
    with called_by(ALICE):
        assert rates.admit("a", clock.now_ns()) == 0
        await put(pool, CHAIN[:1], rig)
    assert rates.admit("a", clock.now_ns()) > 0
    assert rates.admit("b", clock.now_ns()) == 0


async def test_ended_leases_are_forgotten(rigs: Rigs) -> None:
    """The book of leases is bounded by those that live."""
    rig = rigs(8)
    pool = guarded(rig)
    with called_by(ALICE):
        await put(pool, CHAIN, rig)
        for _ in range(3000):
            await pool.acquire("o", 1, CHAIN, sequence=0, patience_s=0.0, fetch_from=())
            rig.handler.tick()
    assert len(pool._leases) < 2500


async def test_quotas_outlive_the_node(rigs: Rigs, tmp_path: Path) -> None:
    """Set by an operator, kept in the book, there again after a restart."""
    rig = rigs(4)
    clock = MonotonicClock()
    admin = NodeAdmin(rig.handler, rig.state, rig.arena, rig.tiers, clock)
    admin.keep_quotas(TenantBook(tmp_path / "tenants.json"))
    await admin.set_quota("a", 12345)
    again = rigs(4)
    restarted: PoolState = again.state
    NodeAdmin(again.handler, restarted, again.arena, again.tiers, clock).keep_quotas(TenantBook(tmp_path / "tenants.json"))
    assert restarted.quotas()["a"].max_bytes == 12345
