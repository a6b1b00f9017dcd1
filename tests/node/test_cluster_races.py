"""What may happen between two steps of a node's cluster side: a block changes its tier, somebody writes at the last moment."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.cluster.memory import MemoryStore
from kvpool.node.inventory import Inventory
from kvpool.node.opening import TierConfig
from kvpool.policy.placement import NodeState
from kvpool.request.admin import Balance
from kvpool.request.pool import Outcome, Reservation
from kvpool.tier.contract import Record
from kvpool.units import MIB, SECOND
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

from .cluster_rig import BLOCK_TOKENS, EXTENT_BLOCKS, LIMIT_S, Cluster
from .conftest import FRAMER, LENGTH, SIZE, Rigs, chain, until

FIRST, SECOND_NODE = f"{0:032x}", f"{1:032x}"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    await made.close()


async def test_block_that_comes_up_from_disk_during_a_walk_is_seen_by_it(rigs: Rigs) -> None:
    """Otherwise a drain that readers keep busy says that everything is safe without having looked at what they read."""
    rig = rigs(32, below=64)
    warm, cold = chain("warm", 1), chain("cold", 4)
    await rig.put(cold)
    await until(lambda: not any(view.dirty or view.holders for key in cold if (view := rig.state.view(key, holders=True)) is not None))
    for key in cold:
        rig.state.discard(key)
    await rig.put(warm)
    walk = Inventory(rig.state, rig.arena, rig.tiers).slices(512)
    seen = {held.key for held in await anext(walk)}
    assert seen == set(warm)
    await rig.tiers.bring(cold, time.monotonic_ns() + 10 * SECOND)
    assert all(rig.state.locate(key) is not None for key in cold)
    async for some in walk:
        assert not seen & {held.key for held in some}
        seen |= {held.key for held in some}
    assert seen == {*warm, *cold}


async def test_keys_that_are_asked_for_twice_in_one_call_are_fetched_once_and_nobody_waits_for_them_for_ever(cluster: Cluster) -> None:
    """A caller's slip must not leave a fetch behind that all later ones wait for in vain."""
    await cluster.open(2)
    chains = cluster.chains(20, EXTENT_BLOCKS)
    await cluster.store(chains)
    foreign = next(keys for keys in chains if cluster.holders(keys[0]) == {FIRST})
    node = cluster.nodes[SECOND_NODE]
    rpc = PoolRpc(node.address, NodeIdentity(node.node_id, node.incarnation))
    try:
        _, places = await rpc.acquire("reader", 1000, [*foreign, *foreign], LIMIT_S, fetch_from=[FIRST])
        assert all(place is not None for place in places)
        assert cluster.counters(SECOND_NODE)["near_fetched"] == len(foreign)
        assert not cluster.side(node).near.under_way
    finally:
        await rpc.close()


async def test_drain_is_not_done_before_the_last_writer_is(cluster: Cluster) -> None:
    """Somebody who began to write before the drain gets their block to where it belongs, and nobody else is let in."""
    await cluster.open(2)
    node = cluster.nodes[FIRST]
    rpc = PoolRpc(node.address, NodeIdentity(node.node_id, node.incarnation))
    admin = AdminRpc(node.address, NodeIdentity(node.node_id, node.incarnation))
    first, second = (keys[0] for keys in cluster.chains(2, 1))
    try:
        lease_id, ((outcome, offset),) = await rpc.reserve("w", 30_000, [Reservation(first, b"", 0, LENGTH)], LIMIT_S)
        assert outcome is Outcome.GRANTED
        assert node.arena is not None
        frame = node.arena.view(offset, LENGTH)
        FRAMER.stamp(frame, first, FRAMER.root, BLOCK_TOKENS)
        await admin.drain(LIMIT_S)

        async def rounds(count: int) -> Balance:
            start = (await admin.balance(LIMIT_S)).rounds
            async with asyncio.timeout(LIMIT_S):
                while (report := await admin.balance(LIMIT_S)).rounds < start + count:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            return report

        async with asyncio.timeout(LIMIT_S):
            late = [Reservation(second, b"", 0, LENGTH)]
            while (await rpc.reserve("late", 100, late, LIMIT_S))[1][0][0] is not Outcome.NO_SPACE:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not (await rounds(3)).settled
        assert await rpc.commit(lease_id, [first], LIMIT_S) == [True]
        async with asyncio.timeout(LIMIT_S):
            while not (report := await admin.balance(LIMIT_S)).settled:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (report.blocks, report.safe_blocks) == (1, 1)
        assert cluster.holders(first) == {FIRST, SECOND_NODE}
    finally:
        await rpc.close()
        await admin.close()


async def test_drain_that_nobody_can_learn_of_goes_on_until_the_store_is_back(cluster: Cluster) -> None:
    """Everything may have been copied by then, but readers would still look for it where it was, and writers bring more."""
    await cluster.open(2)
    chains = cluster.chains(4, EXTENT_BLOCKS)
    await cluster.store(chains)
    store = MemoryStore.named(cluster.name)
    store.go_down()
    drain = asyncio.create_task(cluster.drain(FIRST))
    side = cluster.side(cluster.nodes[FIRST])
    await asyncio.sleep(1.5)
    assert side.balancer.report().state is NodeState.DRAINING
    assert not side.balancer.closed
    assert not drain.done()
    store.come_back(emptied=False)
    assert (await drain).settled
    assert cluster.side(cluster.nodes[FIRST]).balancer.closed
    assert all(SECOND_NODE in cluster.holders(key) for chain in chains for key in chain)


async def test_ttl_runs_while_a_block_waits_for_its_turn_to_be_pushed(cluster: Cluster) -> None:
    """A slow rate must not make blocks live longer."""
    await cluster.open(2)
    chains = cluster.chains(20, EXTENT_BLOCKS)
    await cluster.store(chains, ttl_ns=600 * SECOND)
    keys = next(keys for keys in chains if cluster.holders(keys[0]) == {FIRST})
    side = cluster.side(cluster.nodes[FIRST])
    target = next(ref for ref in side.links.nodes() if ref.node_id == SECOND_NODE)
    side.pusher.bucket.change(1.0, time.monotonic_ns())
    pushing = asyncio.create_task(side.pusher.push(target, keys, near=True))  # a copy that stays there
    await asyncio.sleep(5)
    side.pusher.bucket.change(1e9, time.monotonic_ns())
    async with asyncio.timeout(LIMIT_S):
        assert await pushing == set(keys)
    for key in keys:
        here, there = (cluster.pool(cluster.nodes[name]).view(key) for name in (FIRST, SECOND_NODE))
        assert here is not None
        assert there is not None
        assert there.expires_ns - here.expires_ns < 4 * SECOND


async def test_another_rate_counts_at_once(cluster: Cluster) -> None:
    """Who began a drain too slowly says so again, and needn't wait for hours."""
    await cluster.open(2)
    await cluster.store(cluster.chains(20))
    report = await asyncio.wait_for(_slow_then_fast(cluster), LIMIT_S)
    assert report.safe_blocks == report.blocks > 0


async def _slow_then_fast(cluster: Cluster) -> Balance:
    node = cluster.nodes[FIRST]
    admin = AdminRpc(node.address, NodeIdentity(node.node_id, node.incarnation))
    try:
        report = await admin.drain(LIMIT_S, bytes_per_s=1)
        pusher = cluster.side(node).pusher
        while pusher.bucket.debt_ns(time.monotonic_ns()) < 100 * SECOND:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert not report.settled
    finally:
        await admin.close()
    return await cluster.drain(FIRST)


async def test_tenant_at_its_quota_is_not_pushed_to_again_and_again(cluster: Cluster) -> None:
    """What a node let go to keep a tenant to its quota is not lacking: pushing it would push out another block of that tenant, for ever."""
    await cluster.open(2, copies=2)
    cluster.pool(cluster.nodes[SECOND_NODE]).set_quota("t", 8 * SIZE)
    chains = cluster.chains(20, EXTENT_BLOCKS)
    await cluster.store(chains, tenant="t")
    await cluster.settled()
    side, other = (cluster.side(cluster.nodes[name]) for name in (FIRST, SECOND_NODE))
    pushed, rounds = side.counted()["pushed"], side.balancer.counters["rounds"]
    await until(lambda: side.balancer.counters["rounds"] >= rounds + 3)
    assert side.counted()["pushed"] == pushed
    assert other.counted()["pushed"] == 0
    assert all(cluster.holders(key) >= {FIRST} for keys in chains for key in keys)


async def test_extents_that_only_the_disk_has_find_their_heads_whatever_their_length(rigs: Rigs) -> None:
    """56 tokens hold three blocks of 16; that a block is the first of its extent is seen without its parent, which lives elsewhere."""
    rig = rigs(32, below=64)
    keys = chain("cold", 9)
    await rig.put(keys)
    await until(lambda: not any(view.dirty or view.holders for key in keys if (view := rig.state.view(key, holders=True)) is not None))
    for key in keys:
        rig.state.discard(key)
    await rig.tiers.remove(keys[:3])
    heads = {held.key: held.head async for some in Inventory(rig.state, rig.arena, rig.tiers).slices(56) for held in some}
    assert heads == {key: keys[3 + index // 3 * 3] for index, key in enumerate(keys[3:])}


async def test_block_that_went_to_disk_damaged_does_not_keep_a_drain_from_ending(cluster: Cluster, tmp_path: Path) -> None:
    """A disk gives back whole what it was given damaged: that is no block, and it is found out before it is sent."""
    await cluster.open(0)
    await cluster.node(FIRST, tiers=TierConfig(ssd=tmp_path / "ssd", ssd_bytes=256 * MIB))
    await cluster.node(SECOND_NODE)
    await cluster.settled()
    (key,) = cluster.chains(1, 1)[0]
    below = cluster.side(cluster.nodes[FIRST]).pusher._tiers.below
    assert below is not None
    await asyncio.to_thread(below.put, [Record(key, None, 0, np.ones(LENGTH, np.uint8))], time.monotonic_ns() + 10 * SECOND)
    report = await cluster.drain(FIRST)
    assert report.blocks == report.safe_blocks
    assert cluster.holders(key) == set()


async def test_longer_extents_cost_no_block(cluster: Cluster) -> None:
    """What begins in the middle of an extent is held without its head: who has the head tells where it belongs."""
    await cluster.open(3)
    chains = cluster.chains(20, 4 * EXTENT_BLOCKS)
    await cluster.store(chains)
    await cluster.configure(extent_tokens=4 * BLOCK_TOKENS * EXTENT_BLOCKS)
    await cluster.settled()
    assert [await cluster.load(keys) for keys in chains] == [4 * EXTENT_BLOCKS] * len(chains)
    assert sum(cluster.side(node).balancer.report().counters["adrift"] for node in cluster.nodes.values()) == 0
