"""Blocks pushed to where they are wanted next: near copies there, on which nothing depends and for which nobody waits."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.block import Namespace
from kvpool.client import AsyncPoolClient, asking, transfer, writing
from kvpool.client.core import Core
from kvpool.client.links import Links, NodeLink
from kvpool.client.sources import NodeRef
from kvpool.errors import DeadlineError
from kvpool.policy.placement import node_from_info, place
from kvpool.pool.allocator import aligned
from kvpool.request import Scope
from kvpool.request.pool import NEAR
from kvpool.testing.pool_cluster import PoolCluster, Spot
from kvpool.units import MS, SECOND
from kvpool.wire.pool_client import PoolRpc

Payload = npt.NDArray[np.uint8]
EXTENT = 32
BLOCKS = 6 * EXTENT
COUNTS = [16] * BLOCKS
TOKENS = list(range(16 * BLOCKS))
OWN = 1


def soon() -> int:
    return time.monotonic_ns() + 60 * SECOND


def fill(index: int, payload: Payload) -> None:
    payload[:] = index % 251


async def looked_up(spot: Spot, chain: list[Any]) -> list[int]:
    """What a node says it has of each block: 0, `OWN` or `NEAR`."""
    rpc = PoolRpc(spot.node.address)
    try:
        return list(await rpc.lookup(chain, 10))
    finally:
        await rpc.close()


async def settled(spots: list[Spot]) -> None:
    """Wait until no lease is left."""
    async with asyncio.timeout(30):
        for spot in spots:
            while (await spot.describe()).write_leases:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture
async def client(cluster: PoolCluster, namespace: Namespace) -> AsyncIterator[AsyncPoolClient]:
    """A client that moves bytes over the same network as its calls."""
    async with await AsyncPoolClient.open(cluster.membership, namespace, transport="grpc") as made:
        yield made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control calls may take two minutes: what doesn't wait for a frozen node ends all the same."""
    for module in (asking, writing):
        monkeypatch.setattr(module, "CONTROL_S", 120.0)


async def three(cluster: PoolCluster, *hosts: str) -> list[Spot]:
    """Three nodes on hosts a, b, c."""
    return [await cluster.add(host=host) for host in hosts or ("a", "b", "c")]


def owned(cluster: PoolCluster, chain: list[Any], spot: Spot) -> list[bool]:
    nodes = [node_from_info(member.id, member.info) for member in cluster.membership.members("node")]
    return [spot.id in one.targets for one in place(chain, EXTENT, nodes, cluster.config.copies) for _ in range(EXTENT)]


async def test_what_a_node_does_not_own_is_pushed_there_as_near_copies_once(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """Its own blocks are its own; what is there already isn't sent again; near copies are on no tenant's account and break no books."""
    spots = await three(cluster)
    pool, there = client.scoped(Scope(salt=b"s" * 32, tenant="t")), spots[1]
    async with await AsyncPoolClient.open(cluster.membership, pool._core.namespace) as salted:
        chain = salted.keys(TOKENS)
    own = owned(cluster, chain, there)
    filled: list[int] = []

    def note(index: int, payload: Payload) -> None:
        filled.append(index)
        fill(index, payload)

    for _ in range(2):
        assert await pool.store(chain, 0, COUNTS, note, deadline_ns=soon(), also=[there.id, "f" * 32]) == BLOCKS
        assert await looked_up(there, chain) == [OWN if mine else NEAR for mine in own]
    assert filled == list(range(BLOCKS))
    assert 0 < sum(own) < BLOCKS
    await settled(spots)
    assert there.node.pool is not None
    size = aligned(client._core.framer.frame_bytes(16))
    assert there.node.pool.quotas()["t"].used_bytes == sum(own) * size
    assert (await spots[0].describe()).blocks + (await spots[2].describe()).blocks == BLOCKS - sum(own)


async def test_blocks_that_are_complete_are_still_pushed_to_where_they_are_wanted(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """Their owners have had them for long; the next reader is on another host."""
    spots = await three(cluster)
    chain = client.keys(TOKENS)
    assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon(), also=[spots[2].id]) == BLOCKS
    assert await looked_up(spots[2], chain) == [OWN if mine else NEAR for mine in owned(cluster, chain, spots[2])]


async def test_no_near_copy_goes_to_a_host_that_owns_the_block(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """Readers there ask its owner: a second copy on the same machine is of no use."""
    spots = await three(cluster, "a", "b", "b")
    chain = client.keys(TOKENS)
    assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon(), also=[spots[1].id, spots[2].id]) == BLOCKS
    first, *rest = [owned(cluster, chain, spot) for spot in spots]
    for own, spot in zip(rest, spots[1:], strict=True):
        assert await looked_up(spot, chain) == [OWN if mine else NEAR if far else 0 for mine, far in zip(own, first, strict=True)]
    assert any(first)


@pytest.mark.parametrize("when", ["before", "granted", "written"])
@pytest.mark.parametrize("fault", ["cut", "freeze"])
@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.usefixtures("patient")
async def test_node_that_fails_where_blocks_are_wanted_fails_and_holds_up_nothing(
    cluster: PoolCluster, client: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch, when: str, fault: str, linked: bool
) -> None:
    """All blocks are held, none is missed, whatever their near copies came to; also when the node was never spoken to before."""
    monkeypatch.setattr(transfer, "STALL_NS", 100 * MS)
    spots = await three(cluster)
    cluster.say(spots[2], weight="1e-9")  # it owns nothing
    there, chain = spots[2], client.keys(TOKENS)
    if linked:
        assert await client.connect() == []
    real = Core.move

    async def moved(self: Core, *args: Any) -> None:
        if when == "granted":
            getattr(there.relay, fault)()
        await real(self, *args)
        if when == "written":
            getattr(there.relay, fault)()

    monkeypatch.setattr(Core, "move", moved)
    if when == "before":
        getattr(there.relay, fault)()
    async with asyncio.timeout(60):
        assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon(), also=[there.id]) == BLOCKS
    assert client.under_replicated == 0
    assert await client.lookup(chain) == BLOCKS
    there.relay.mend()
    await settled(spots)


@pytest.mark.usefixtures("patient")
async def test_connection_that_does_not_come_about_holds_up_nothing(
    cluster: PoolCluster, client: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write gives its owners' first connections time; those for near copies no more than any late answer."""
    spots = await three(cluster)
    cluster.say(spots[2], weight="1e-9")
    real = Links.link

    async def link(self: Links, ref: NodeRef, timeout_s: float) -> NodeLink:
        if ref.node_id == spots[2].id:
            await asyncio.sleep(timeout_s)
            raise DeadlineError("no connection")
        return await real(self, ref, timeout_s)

    monkeypatch.setattr(Links, "link", link)
    async with asyncio.timeout(30):
        chain = client.keys(TOKENS)
        assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon(), also=[spots[2].id]) == BLOCKS
    assert client.under_replicated == 0


@pytest.mark.usefixtures("patient")
async def test_near_copies_alone_hold_nothing(cluster: PoolCluster, client: AsyncPoolClient) -> None:
    """Their owner is dead: near copies may leave at any moment, so the pool doesn't hold these blocks; nor are they waited for."""
    spots = await three(cluster)
    for spot in spots[1:]:
        cluster.say(spot, weight="1e-9")
    there, chain = spots[1], client.keys(TOKENS)
    assert await client.connect() == []
    spots[0].relay.cut()
    for _ in range(2):
        assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon(), also=[there.id]) == 0
        assert await looked_up(there, chain) == [NEAR] * BLOCKS
    there.relay.freeze()
    async with asyncio.timeout(30):
        assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon(), also=[there.id]) == 0
    assert client.under_replicated == 0
    there.relay.mend()


@pytest.mark.parametrize("when", ["before", "granted"])
@pytest.mark.usefixtures("patient")
async def test_owner_that_is_slow_is_waited_for_although_a_near_copy_is_there(
    cluster: PoolCluster, client: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The hand-off must not make a write content with less."""
    monkeypatch.setattr(transfer, "STALL_NS", 100 * MS)
    spots = await three(cluster)
    for spot in spots[1:]:
        cluster.say(spot, weight="1e-9")
    owner, chain, real = spots[0], client.keys(TOKENS), Core.move
    other = client.keys([7, *TOKENS[1:]])
    assert await client.store(other, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS  # all its connections are open

    async def moved(self: Core, *args: Any) -> None:
        if when == "granted":
            owner.relay.freeze()
        await real(self, *args)

    monkeypatch.setattr(Core, "move", moved)
    if when == "before":
        owner.relay.freeze()
    work = asyncio.create_task(client.store(chain, 0, COUNTS, fill, deadline_ns=soon(), also=[spots[1].id]))
    await asyncio.sleep(1.0)
    assert not work.done()
    owner.relay.mend()
    assert await work == BLOCKS
    assert await looked_up(owner, chain) == [OWN] * BLOCKS
