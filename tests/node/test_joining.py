"""Joining while others join, crash or come back: every node ends up active, with what is its."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpool.cluster.memory import MemoryStore
from kvpool.node.balancer import BalanceSettings
from kvpool.node.opening import TierConfig
from kvpool.policy.placement import NodeState
from kvpool.units import MIB

from .cluster_rig import Cluster, Load


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    await made.close()


async def test_two_that_join_at_once_both_get_their_share(cluster: Cluster) -> None:
    """Each is a newcomer in the other's eyes; neither waits for the other."""
    await cluster.open(2)
    chains = cluster.chains(40)
    await cluster.store(chains)
    load = Load(cluster, chains)
    await asyncio.gather(cluster.node("d" * 32), cluster.node("e" * 32))
    await cluster.settled()
    await load.stop()
    assert load.short == 0
    assert cluster.misplaced(chains) == 0


async def test_newcomer_of_a_store_that_forgot_is_a_newcomer_once_the_others_are_heard_of(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """An emptied store names nobody; a node that takes that for a new cluster would answer for blocks that others still have."""
    caplog.set_level(logging.INFO, "kvpool.node.standing")
    await cluster.open(2)
    chains = cluster.chains(40)
    await cluster.store(chains)
    store = MemoryStore.named(cluster.name)
    with store.changed:
        store.birth, forgotten, store.live = uuid.uuid4().hex, store.live, {}
        store.touch()
    newcomer = await cluster.node("d" * 32, balance=BalanceSettings(repair_s=0.5, news_s=3.0))
    assert cluster.side(newcomer).balancer.state is NodeState.ACTIVE
    with store.changed:  # their heartbeats
        store.live.update(forgotten)
        store.touch()
    await cluster.settled()
    assert f"node {'d' * 32} is joining" in caplog.messages
    assert cluster.misplaced(chains) == 0
    assert [await cluster.load(chain) for chain in chains] == [8] * len(chains)


async def test_peer_that_crashes_while_it_hands_over_is_not_waited_for(cluster: Cluster) -> None:
    """The newcomer becomes active with what the others had."""
    await cluster.open(3, copies=2)
    chains = cluster.chains(40)
    await cluster.store(chains)
    for node in cluster.nodes.values():
        cluster.side(node).pusher.bucket.change(1.0, 0)
    newcomer = await cluster.node("d" * 32)
    assert cluster.side(newcomer).balancer.state is NodeState.JOINING
    await cluster.crash(f"{0:032x}")
    await cluster.settled()
    assert cluster.misplaced(chains, copies=2) == 0
    assert [await cluster.load(chain) for chain in chains] == [8] * len(chains)


async def test_all_that_restart_at_once_are_active_again_with_what_their_disks_have(cluster: Cluster, tmp_path: Path) -> None:
    """Members of before the power cut are still in the store: nobody may wait for them to hand something over for ever."""
    await cluster.open(0)
    tiers = {name * 32: TierConfig(ssd=tmp_path / name, ssd_bytes=256 * MIB) for name in "abc"}
    for name, tier in tiers.items():
        await cluster.node(name, tiers=tier)
    await cluster.settled()
    chains = cluster.chains(20)
    await cluster.store(chains)
    for name in tiers:
        await cluster.crash(name)
    await asyncio.gather(*(cluster.node(name, tiers=tier) for name, tier in tiers.items()))
    await cluster.settled()
    assert [await cluster.load(chain) for chain in chains] == [8] * len(chains)


async def test_newcomer_that_is_too_small_becomes_active_all_the_same(cluster: Cluster) -> None:
    """It can't take all that is its: what it refused is nothing to wait for."""
    await cluster.open(1)
    chains = cluster.chains(60)
    await cluster.store(chains)
    newcomer = await cluster.node("d" * 32, blocks=32)
    async with asyncio.timeout(20):
        while cluster.side(newcomer).balancer.state is not NodeState.ACTIVE:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_newcomer_crashes_while_it_is_filled_and_nothing_is_lost(cluster: Cluster) -> None:
    """Who gave keeps what it has until the newcomer is active."""
    await cluster.open(2)
    chains = cluster.chains(40)
    await cluster.store(chains)
    newcomer = await cluster.node("d" * 32)
    async with asyncio.timeout(20):
        while not cluster.pool(newcomer).books().blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await cluster.crash("d" * 32)
    await cluster.settled()
    assert [await cluster.load(chain) for chain in chains] == [8] * len(chains)
    assert cluster.misplaced(chains) == 0
