"""One client and several nodes: where copies go, and what is read when nodes die, freeze, come, leave or lie."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.block import BlockKey, Namespace
from kvpool.client import AsyncPoolClient, asking, health, pool, transfer, writing
from kvpool.client.core import Core
from kvpool.policy.placement import Placement, node_from_info, place
from kvpool.testing.pool_cluster import PoolCluster, Spot
from kvpool.tier import ArenaMapping
from kvpool.units import MS, SECOND
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

Payload = npt.NDArray[np.uint8]
EXTENT = 32
BLOCKS = 6 * EXTENT
COUNTS = [16] * BLOCKS
TOKENS = list(range(16 * BLOCKS))
Clients = Callable[[], "AsyncPoolClient"]


def soon(seconds: float = 60.0) -> int:
    return time.monotonic_ns() + int(seconds * SECOND)


def content(index: int, nbytes: int) -> Payload:
    return np.random.default_rng(index).integers(0, 256, nbytes, dtype=np.uint8)


def fill(index: int, payload: Payload) -> None:
    payload[:] = content(index, payload.nbytes)


class Sink(list[int]):
    """The indices that came, each with the right bytes."""

    def __call__(self, index: int, payload: Payload) -> None:
        assert np.array_equal(payload, content(index, payload.nbytes))
        self.append(index)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control calls may take a minute: what doesn't wait for a frozen node ends all the same, what does runs into the test's time limit."""
    for module in (asking, writing):
        monkeypatch.setattr(module, "CONTROL_S", 60.0)


@pytest.fixture
async def client(cluster: PoolCluster, namespace: Namespace) -> AsyncIterator[AsyncPoolClient]:
    """A client that moves bytes over the same network as its calls."""
    async with await AsyncPoolClient.open(cluster.membership, namespace, transport="grpc") as made:
        yield made


async def three(cluster: PoolCluster, copies: int = 2) -> list[Spot]:
    cluster.configure(copies=copies)
    return [await cluster.add() for _ in range(3)]


def placed(cluster: PoolCluster, chain: list[BlockKey], copies: int = 2) -> list[Placement]:
    """Where each block belongs, from the members' records."""
    nodes = [node_from_info(member.id, member.info) for member in cluster.membership.members("node")]
    return [one for one in place(chain, EXTENT, nodes, copies) for _ in range(EXTENT)]


async def stored(client: AsyncPoolClient) -> list[BlockKey]:
    chain = client.keys(TOKENS)
    async with asyncio.timeout(30):
        assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    return chain


def asked_first(cluster: PoolCluster, spots: list[Spot], chain: list[BlockKey]) -> Spot:
    """A node that every load of `chain` asks before others: where that is follows from the keys."""
    first = placed(cluster, chain)[0].order[0]
    return next(spot for spot in spots if spot.id == first)


async def loads_all(client: AsyncPoolClient, chain: list[BlockKey]) -> None:
    sink = Sink()
    async with asyncio.timeout(30):
        assert await client.load(chain, 0, COUNTS, sink, deadline_ns=soon()) == BLOCKS
    assert sink == list(range(BLOCKS))


async def no_leases(spots: list[Spot]) -> None:
    for spot in spots:
        async with asyncio.timeout(30):
            while True:
                books = await spot.describe()
                assert books.free_bytes + books.used_bytes + books.pinned_bytes == books.capacity_bytes
                if books.read_leases == books.write_leases == books.pinned_bytes == 0:
                    break
                await asyncio.sleep(0.02)


async def test_every_block_is_on_the_nodes_that_placement_names(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """Two copies of each and no third; what is complete isn't written again; nothing stays leased."""
    spots = await three(cluster)
    chain = await stored(client)
    targets = [set(one.targets) for one in placed(cluster, chain)]
    for spot in spots:
        assert await spot.holds(chain) == [spot.id in some for some in targets]
    assert client.under_replicated == 0

    def never(index: int, payload: Payload) -> None:
        raise AssertionError("asked for a block that is complete")

    assert await client.store(chain, 0, COUNTS, never, deadline_ns=soon()) == BLOCKS
    assert await client.lookup(chain) == BLOCKS
    await loads_all(client, chain)
    await no_leases(spots)


async def test_copies_of_a_namespace_and_extents_follow_the_config(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """One namespace may be worth more than the rest, and what is stored after a change obeys it."""
    spots = await three(cluster, copies=1)
    fingerprint = client.namespace.fingerprint().hex()
    cluster.membership.configure(lambda config: config.with_setting(f"namespace_copies.{fingerprint}", "3"))
    cluster.configure(extent_tokens=64)
    chain = await stored(client)
    assert [await spot.holds(chain) for spot in spots] == [[True] * BLOCKS] * 3
    await loads_all(client, chain)


async def test_more_copies_than_nodes_are_as_many_as_nodes(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """A small cluster does what it can, and nothing is missing that could be there."""
    cluster.configure(copies=5)
    spots = [await cluster.add(), await cluster.add()]
    chain = await stored(client)
    assert [await spot.holds(chain) for spot in spots] == [[True] * BLOCKS] * 2
    assert client.under_replicated == 0
    await loads_all(client, chain)


@pytest.mark.parametrize("victim", range(3))
async def test_any_dead_node_costs_nothing_with_two_copies(cluster: PoolCluster, client: AsyncPoolClient, victim: int) -> None:
    """Loads, lookups and stores go on; the copies that the dead one should have had are counted."""
    spots = await three(cluster)
    chain = await stored(client)
    spots[victim].relay.cut()
    await loads_all(client, chain)
    assert await client.lookup(chain) == BLOCKS
    other = client.keys([7, *TOKENS[1:]])
    assert await client.store(other, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    missing = sum(spots[victim].id in one.targets for one in placed(cluster, other))
    assert client.under_replicated == missing > 0
    await loads_all(client, other)


async def test_failing_node_is_called_once_by_a_load(
    cluster: PoolCluster, client: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it owned is asked of the others in the same load, and the next load leaves it alone."""
    spots = await three(cluster)
    chain = await stored(client)
    victim = asked_first(cluster, spots, chain)
    victim.relay.cut()
    asked: list[str] = []
    real = PoolRpc.acquire

    async def counted(self: PoolRpc, *args: Any, **options: Any) -> Any:
        asked.append(self.address)
        return await real(self, *args, **options)

    monkeypatch.setattr(PoolRpc, "acquire", counted)
    monkeypatch.setattr(health, "REST_NS", 60 * SECOND)
    await loads_all(client, chain)
    await loads_all(client, chain)
    assert asked.count(victim.relay.address) == 1


async def test_node_that_dies_between_grant_and_bytes_is_replaced_in_the_same_load(
    cluster: PoolCluster, client: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease it gave is worth nothing; its blocks come from the other copy."""
    spots = await three(cluster)
    chain = await stored(client)
    real = Core.move

    async def first_kill(self: Core, *args: Any) -> None:
        spots[1].relay.cut()
        await real(self, *args)

    monkeypatch.setattr(Core, "move", first_kill)
    await loads_all(client, chain)


@pytest.mark.parametrize(("victim", "at"), [(0, 40), (1, 0), (2, 100)])
@pytest.mark.parametrize("fault", ["cut", "freeze"])
@pytest.mark.usefixtures("patient")
async def test_node_that_fails_amid_the_bytes_is_replaced_and_order_is_kept(
    cluster: PoolCluster, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, fault: str, victim: int, at: int
) -> None:
    """Every block comes once, in order, right, whatever its node did after the first few."""
    monkeypatch.setattr(transfer, "WINDOW_BYTES", 70_000)
    monkeypatch.setattr(transfer, "STALL_NS", 300 * MS)
    relay = (await three(cluster))[victim].relay
    loop, sink = asyncio.get_running_loop(), Sink()

    async def fail() -> None:
        getattr(relay, fault)()

    def breaks(index: int, payload: Payload) -> None:
        sink(index, payload)
        if index == at:
            asyncio.run_coroutine_threadsafe(fail(), loop).result(10)

    async with await AsyncPoolClient.open(cluster.membership, namespace, transport="grpc") as client:
        chain = await stored(client)
        async with asyncio.timeout(30):
            assert await client.load(chain, 0, COUNTS, breaks, deadline_ns=soon()) == BLOCKS
        relay.mend()
    assert sink == list(range(BLOCKS))


@pytest.mark.usefixtures("patient")
async def test_frozen_node_delays_nobody_for_long(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """Loads, lookups and stores end while its answers are still out, and what it grants when it wakes up is given back."""
    spots = await three(cluster)
    chain = await stored(client)
    spots[2].relay.freeze()
    for _ in range(3):
        await loads_all(client, chain)
        async with asyncio.timeout(30):
            assert await client.lookup(chain, timeout_s=60) == BLOCKS
    other = client.keys([7, *TOKENS[1:]])
    async with asyncio.timeout(30):
        assert await client.store(other, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    assert client.under_replicated == sum(spots[2].id in one.targets for one in placed(cluster, other))
    await loads_all(client, other)
    spots[2].relay.mend()
    await no_leases(spots)


@pytest.mark.usefixtures("patient")
async def test_frozen_only_copy_is_waited_for(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """Where there is no other, a slow answer is better than none."""
    spots = await three(cluster, copies=1)
    chain = await stored(client)
    owner = asked_first(cluster, spots, chain)
    owner.relay.freeze()
    work = asyncio.create_task(client.load(chain, 0, COUNTS, sink := Sink(), deadline_ns=soon()))
    await asyncio.sleep(0.3)
    assert not work.done()
    owner.relay.mend()
    assert await work == BLOCKS
    assert sink == list(range(BLOCKS))


@pytest.mark.usefixtures("patient")
async def test_cancelled_load_gives_back_what_is_granted_later(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """A caller that goes away while a node sleeps leaves no lease there."""
    spots = await three(cluster, copies=1)
    chain = await stored(client)
    owner = asked_first(cluster, spots, chain)
    owner.relay.freeze()
    work = asyncio.create_task(client.load(chain, 0, COUNTS, Sink(), deadline_ns=soon()))
    await asyncio.sleep(0.1)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    owner.relay.mend()
    await no_leases(spots)


async def test_joining_node_without_data_hides_nothing(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """It owns its share from the first moment, gets what is written, and whom it displaced is asked for what it lacks."""
    cluster.configure(copies=1)
    await cluster.add()
    await cluster.add()
    chain = await stored(client)
    third = await cluster.add(state="joining")
    share = [third.id in one.targets for one in placed(cluster, chain, 1)]
    assert any(share)
    await loads_all(client, chain)
    assert await client.lookup(chain) == BLOCKS
    other = client.keys([7, *TOKENS[1:]])
    assert await client.store(other, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    assert await third.holds(other) == [third.id in one.targets for one in placed(cluster, other, 1)]
    cluster.say(third, state="active")  # before it has its share: now those blocks are misses
    assert await client.load(chain, 0, COUNTS, Sink(), deadline_ns=soon()) == share.index(True)


async def test_draining_node_is_read_and_not_written(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """What it holds is found until it has gone; what is new goes where it will stay."""
    spots = await three(cluster, copies=1)
    chain = await stored(client)
    cluster.say(spots[0], state="draining")
    await loads_all(client, chain)
    assert await client.lookup(chain) == BLOCKS
    other = client.keys([7, *TOKENS[1:]])
    assert await client.store(other, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    assert not any(await spots[0].holds(other))
    await loads_all(client, other)


async def test_view_that_changes_between_two_calls_loses_nothing_with_two_copies(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """One node leaves for good and another joins: of every block one old owner is still asked."""
    spots = await three(cluster)
    chain = await stored(client)
    cluster.leave(spots[1])
    await cluster.add(state="joining")
    await loads_all(client, chain)
    cluster.say(cluster.spots[3], state="active")
    await loads_all(client, chain)


async def test_weights_and_zones_of_the_records_are_obeyed(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """Two copies are never in one zone, and a heavier node has more."""
    cluster.configure(copies=2)
    spots = [await cluster.add(zone=zone, weight=weight) for zone, weight in (("east", "1"), ("east", "50"), ("west", "1"))]
    chain = await stored(client)
    light, heavy, west = [await spot.holds(chain) for spot in spots]
    assert all(west)
    assert all(a != b for a, b in zip(light, heavy, strict=True))
    assert sum(heavy) > sum(light)
    await loads_all(client, chain)


async def test_quarantined_node_is_left_alone(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """The cluster says that it can't be reached: it is neither asked nor written to, and its copies go to the next in rank."""
    spots = await three(cluster)
    chain = await stored(client)
    member = spots[0].registration.member
    spots[0].relay.freeze()
    cluster.membership.report(member.role, member.id, member.incarnation, False)
    async with asyncio.timeout(30):
        while member.identity not in cluster.membership.quarantined():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    before = spots[0].relay.connections
    await loads_all(client, chain)
    other = client.keys([7, *TOKENS[1:]])
    assert await client.store(other, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    assert client.under_replicated == 0
    assert [await spot.holds(other) for spot in spots[1:]] == [[True] * BLOCKS] * 2
    assert spots[0].relay.connections == before


async def test_node_that_keeps_failing_is_reported_probed_and_asked_again(
    cluster: PoolCluster, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three failures in a row make it ill, the cluster hears of it, and a probe that is answered ends both."""
    monkeypatch.setattr(pool, "_TEND_S", 0.05)
    monkeypatch.setattr(health, "REST_NS", MS)
    monkeypatch.setattr(health, "ILL_REST_NS", MS)
    spots = await three(cluster)
    async with await AsyncPoolClient.open(cluster.membership, namespace, transport="grpc") as client:
        chain = await stored(client)
        victim = asked_first(cluster, spots, chain)
        member = victim.registration.member
        victim.relay.cut()
        async with asyncio.timeout(60):
            while member.identity not in cluster.membership.quarantined():
                await loads_all(client, chain)
        victim.relay.mend()
        async with asyncio.timeout(60):
            while cluster.membership.quarantined():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await loads_all(client, chain)
        await client.connect()
        assert set(client.reaches()) == {spot.id for spot in spots}


async def test_impatient_callers_report_nobody(cluster: PoolCluster, client: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that had a moment each end in a miss where nobody answers in time, but a busy node must not be voted out for that."""
    monkeypatch.setattr(health, "REST_NS", MS)
    spots = await three(cluster, copies=1)
    chain = await stored(client)
    for spot in spots:
        spot.relay.freeze()
    for _ in range(8):
        assert await client.load(chain, 0, COUNTS, Sink(), deadline_ns=soon(0.05)) == 0
        await asyncio.sleep(0.002)
    assert client._core.links.health.ill() == []
    for spot in spots:
        spot.relay.mend()
    await asyncio.sleep(0.002)
    await loads_all(client, chain)
    await no_leases(spots)


async def test_damaged_copy_is_read_from_the_other_node(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """A flipped bit is found, the block comes from elsewhere in the same load, and the bad copy is dropped."""
    spots = await three(cluster)
    chain = await stored(client)
    owner = next(spot for spot in spots if spot.id == placed(cluster, chain)[40].targets[0])
    about = await owner.describe()
    assert about.shm is not None
    rpc = PoolRpc(owner.node.address, NodeIdentity(about.node_id, about.incarnation))
    lease_id, (where,) = await rpc.acquire("test", 10_000, [chain[40]], 5)
    await rpc.release(lease_id, (), 5)
    await rpc.close()
    assert where is not None
    with ArenaMapping.open(about.shm.path, about.node_id, about.incarnation) as mapping:
        mapping.view(*where)[where[1] - 9] ^= 1
    await loads_all(client, chain)
    await no_leases(spots)
    assert (await owner.describe()).counters["corrupt"] == 1
    assert await owner.holds([chain[40]]) == [False]


async def test_block_that_one_node_has_lost_is_read_and_restored(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """A node that was restarted empty holds nothing of its share: reads find the other copies, the next store puts them back."""
    cluster.configure(copies=2)
    first = await cluster.add()
    chain = await stored(client)
    second = await cluster.add()
    await loads_all(client, chain)
    assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    assert [await spot.holds(chain) for spot in (first, second)] == [[True] * BLOCKS] * 2


async def test_blocks_are_pushed_also_to_where_they_are_wanted_next(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """The hand-off: a node that owns nothing of it gets it all; one that is gone is nobody's mistake, and no copy is missing."""
    spots = await three(cluster, copies=1)
    chain = client.keys(TOKENS)
    assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon(), also=[spots[1].id, "f" * 32]) == BLOCKS
    assert await spots[1].holds(chain) == [True] * BLOCKS
    assert client.under_replicated == 0
    await no_leases(spots)
