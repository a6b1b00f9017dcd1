"""Nodes as one pool: who joins gets its share, who leaves leaves nothing behind, who crashes is replaced."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpool.client.retention import Retention
from kvpool.node.opening import TierConfig
from kvpool.policy.placement import NodeState
from kvpool.units import MIB, SECOND

from .cluster_rig import EXTENT_BLOCKS, NAMESPACE, Cluster, Load


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    await made.close()


async def test_fourth_node_that_joins_under_load_gets_its_share_and_nobody_misses_anything(cluster: Cluster) -> None:
    """Growing the pool must cost no hit and move no more than the newcomer's share."""
    await cluster.open(3)
    chains = cluster.chains(60)
    await cluster.store(chains)
    assert cluster.misplaced(chains) == 0
    load = Load(cluster, chains)
    newcomer = await cluster.node("f" * 32)
    assert cluster.side(newcomer).balancer.state is NodeState.JOINING
    await cluster.settled()
    await load.stop()
    assert load.loads > 20
    assert load.short == 0
    assert cluster.misplaced(chains) == 0
    moved = sum(cluster.counters(name)["pushed"] for name in cluster.nodes)
    extents = len(chains) * 8 // EXTENT_BLOCKS
    assert moved == cluster.pool(newcomer).books().blocks
    assert 0 < moved / EXTENT_BLOCKS <= (1 / 4 + 0.1) * extents  # few extents: the 2 % are shown by tests/policy/test_moves.py
    assert sum(cluster.counters(name)["pushed_extents"] for name in cluster.nodes) == moved / EXTENT_BLOCKS


async def test_node_drained_under_load_may_go_without_losing_a_hit(cluster: Cluster) -> None:
    """That is what draining is for."""
    await cluster.open(3)
    chains = cluster.chains(40)
    await cluster.store(chains)
    gone = f"{1:032x}"
    held = cluster.pool(cluster.nodes[gone]).books().blocks
    assert held > 0
    load = Load(cluster, chains)
    report = await cluster.drain(gone)
    assert (report.state, report.blocks, report.safe_blocks) == (NodeState.DRAINING, held, held)
    assert report.counters["pushed"] == held
    await cluster.store(cluster.chains(10, first=1000))
    assert cluster.pool(cluster.nodes[gone]).books().blocks == held  # nobody writes to it any more
    await cluster.stop(gone)
    await cluster.settled()
    await load.stop()
    assert load.loads > 20
    assert load.short == 0
    assert cluster.misplaced(chains) == 0


async def test_drain_that_is_cancelled_leaves_the_node_in_its_place(cluster: Cluster) -> None:
    """An operator may change their mind; what was moved comes back to where it belongs."""
    await cluster.open(2)
    chains = cluster.chains(20)
    await cluster.store(chains)
    node = f"{0:032x}"
    await cluster.drain(node)
    report = await cluster.drain(node, cancel=True)
    assert report.state == NodeState.ACTIVE
    await cluster.settled()
    assert cluster.misplaced(chains) == 0


async def test_crash_with_two_copies_loses_nothing_and_is_repaired(cluster: Cluster) -> None:
    """The copies that are left make new ones."""
    await cluster.open(4, copies=2)
    chains = cluster.chains(30)
    await cluster.store(chains)
    assert cluster.misplaced(chains, copies=2) == 0
    await cluster.crash(f"{2:032x}")
    assert [await cluster.load(chain) for chain in chains] == [8] * len(chains)
    await cluster.settled()
    assert cluster.misplaced(chains, copies=2) == 0


async def test_more_copies_than_before_are_made_and_fewer_let_go(cluster: Cluster) -> None:
    """A cluster's config is true of what is stored already, too."""
    await cluster.open(3)
    chains = cluster.chains(15)
    await cluster.store(chains)
    await cluster.configure(copies=2)
    await cluster.settled()
    assert cluster.misplaced(chains, copies=2) == 0
    await cluster.configure(copies=1)
    await cluster.settled()
    assert cluster.misplaced(chains) == 0


async def test_restarted_node_gets_back_what_is_its(cluster: Cluster) -> None:
    """It comes back empty under its old id: a new life, joining, that the other copies fill."""
    await cluster.open(3, copies=2)
    chains = cluster.chains(20)
    await cluster.store(chains)
    node = f"{1:032x}"
    await cluster.stop(node)
    again = await cluster.node(node)
    assert cluster.side(again).balancer.state is NodeState.JOINING
    assert cluster.pool(again).books().blocks == 0
    await cluster.settled()
    assert cluster.misplaced(chains, copies=2) == 0
    assert cluster.pool(again).books().blocks > 0


async def test_ttl_tenant_and_priority_travel_with_a_block(cluster: Cluster) -> None:
    """A block that moves stays what it is."""
    await cluster.open(1)
    (chain,) = cluster.chains(1, EXTENT_BLOCKS)
    await cluster.store([chain], ttl_ns=600 * SECOND, tenant="t", retention=[Retention(0, None, 80, 300 * SECOND)])
    await cluster.node("f" * 32)
    await cluster.settled()
    await cluster.drain(f"{0:032x}")
    moved = cluster.pool(cluster.nodes["f" * 32])
    views = [moved.view(key) for key in chain]
    for index, view in enumerate(views):
        assert view is not None
        assert (view.tenant, view.priority, view.depth) == ("t", 80, 16 * index)
        assert view.parent == (chain[index - 1] if index else None)
        assert view.sequence == 64
        assert 500 * SECOND < view.expires_ns - view.committed_ns < 600 * SECOND
        assert 200 * SECOND < view.priority_until_ns - view.committed_ns < 300 * SECOND


async def test_blocks_that_only_the_disk_has_are_drained_without_passing_through_memory(cluster: Cluster, tmp_path: Path) -> None:
    """A drain empties the whole node, and what is cold pushes nothing warm out on its way."""
    await cluster.open(0)
    tiers = TierConfig(ssd=tmp_path / "ssd", ssd_bytes=256 * MIB)
    small = await cluster.node(f"{0:032x}", blocks=40, tiers=tiers)
    await cluster.settled()
    chains = cluster.chains(30)
    await cluster.store(chains)
    await cluster.node("f" * 32)
    await cluster.settled()
    before = cluster.pool(small).counters()
    report = await cluster.drain(f"{0:032x}")
    assert report.safe_blocks == report.blocks > 40
    after = cluster.pool(small).counters()
    assert (after["inserted"], after["evicted"]) == (before["inserted"], before["evicted"])
    await cluster.stop(f"{0:032x}")
    await cluster.settled()
    assert [await cluster.load(chain) for chain in chains] == [8] * len(chains)


async def test_node_restarted_with_its_disk_takes_its_place_with_what_is_on_it(cluster: Cluster, tmp_path: Path) -> None:
    """Blocks on a disk count: they are neither pushed again nor lost, and what is not the node's any more goes to whose it is."""
    await cluster.open(2)
    node = f"{7:032x}"
    tiers = TierConfig(ssd=tmp_path / "ssd", ssd_bytes=256 * MIB)
    await cluster.node(node, tiers=tiers)
    await cluster.settled()
    chains = cluster.chains(30)
    await cluster.store(chains)
    held = cluster.pool(cluster.nodes[node]).books().blocks
    assert held > 0
    await cluster.stop(node)
    await cluster.node(node, tiers=tiers)
    await cluster.settled()
    assert [await cluster.load(chain) for chain in chains] == [8] * len(chains)
    assert sum(cluster.counters(name)["pushed"] for name in cluster.nodes) == 0
    await cluster.node(f"{8:032x}")
    await cluster.settled()
    assert [await cluster.load(chain) for chain in chains] == [8] * len(chains)


async def test_damaged_block_is_dropped_and_not_pushed(cluster: Cluster) -> None:
    """Damage must not spread; the rest of the extent goes."""
    await cluster.open(1)
    (chain,) = cluster.chains(1, EXTENT_BLOCKS)
    await cluster.store([chain])
    node = cluster.nodes[f"{0:032x}"]
    place = cluster.pool(node).locate(chain[2])
    assert place is not None
    assert node.arena is not None
    node.arena.view(*place)[-1] ^= 1
    await cluster.node("f" * 32)
    await cluster.settled()
    await cluster.drain(f"{0:032x}")
    assert [bool(cluster.holders(key)) for key in chain] == [True, True, False, True]
    assert cluster.counters(f"{0:032x}")["push_failed"] == 1


async def test_copies_of_a_namespace_count_for_blocks_that_only_disks_have(cluster: Cluster, tmp_path: Path) -> None:
    """What a block's namespace is worth is asked of the block, wherever it is: a second copy on disk is no stray."""
    await cluster.open(0, namespace_copies={NAMESPACE.fingerprint().hex(): 2})
    for name in ("a", "b"):
        await cluster.node(name * 32, blocks=24, tiers=TierConfig(ssd=tmp_path / name, ssd_bytes=256 * MIB))
    await cluster.settled()
    chains = cluster.chains(20)
    await cluster.store(chains)
    await cluster.node("c" * 32)
    await cluster.settled()
    async with asyncio.timeout(30):  # until the round after the one that let go of what is the newcomer's now
        while sum(cluster.side(node).balancer.report().blocks for node in cluster.nodes.values()) != 2 * 8 * len(chains):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await cluster.crash("a" * 32)
    assert [await cluster.load(chain) for chain in chains] == [8] * len(chains)


async def test_copies_of_a_namespace_are_its_own(cluster: Cluster) -> None:
    """A namespace may be worth more copies than others."""
    await cluster.open(3, namespace_copies={NAMESPACE.fingerprint().hex(): 2})
    chains = cluster.chains(15)
    await cluster.store(chains)
    assert cluster.misplaced(chains, copies=2) == 0
    await cluster.stop(f"{0:032x}")
    await cluster.settled()
    assert cluster.misplaced(chains, copies=2) == 0


async def test_node_that_is_full_is_not_pushed_to_again_and_again(cluster: Cluster) -> None:
    """What a full node lacks it has evicted: repairing that would evict something else, for ever."""
    await cluster.open(1)
    chains = cluster.chains(40)
    await cluster.store(chains)
    await cluster.node("f" * 32, blocks=64)
    await cluster.configure(copies=2)
    await cluster.settled()
    pushed = cluster.counters(f"{0:032x}")["pushed"]
    assert pushed > 64  # more than it can hold: each once, when the cluster changed
    rounds = cluster.side(cluster.nodes[f"{0:032x}"]).balancer.counters["rounds"]
    async with asyncio.timeout(30):
        while cluster.side(cluster.nodes[f"{0:032x}"]).balancer.counters["rounds"] < rounds + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert cluster.counters(f"{0:032x}")["pushed"] == pushed


async def test_joins_crashes_drains_and_restarts_in_a_row_lose_nothing_under_reads_and_writes(cluster: Cluster) -> None:
    """With two copies each of them alone costs nothing, and what is written meanwhile ends where it belongs."""
    await cluster.open(3, copies=2)
    stored = cluster.chains(20)
    await cluster.store(stored)
    load = Load(cluster, stored)

    async def write(count: int) -> None:
        for _ in range(count):
            chains = cluster.chains(1, first=1000 + len(stored))
            await cluster.store(chains)
            stored.extend(chains)

    await asyncio.gather(write(10), cluster.node("d" * 32))
    await cluster.settled()
    await asyncio.gather(write(10), cluster.crash(f"{0:032x}"))
    await cluster.settled()
    await asyncio.gather(write(10), cluster.drain(f"{1:032x}"))
    await cluster.stop(f"{1:032x}")
    await asyncio.gather(write(10), cluster.node("e" * 32))
    await cluster.settled()
    await cluster.stop("d" * 32)
    await asyncio.gather(write(10), cluster.node("d" * 32))
    await cluster.settled()
    await load.stop()
    assert load.loads > 20
    assert load.short == 0
    assert cluster.misplaced(stored, copies=2) == 0
