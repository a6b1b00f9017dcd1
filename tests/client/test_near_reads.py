"""Reads prefer the host's own node: for its copies, and to fetch and keep near what others own."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.block import Namespace
from kvpool.client import AsyncPoolClient
from kvpool.node.cluster import NodePlace
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.testing.pool_cluster import PoolCluster
from kvpool.transport import host_boot_id
from kvpool.units import MIB, SECOND
from kvpool.wire.pool_client import PoolRpc

BLOCKS = 6 * 32
COUNTS = [16] * BLOCKS
TOKENS = list(range(16 * BLOCKS))
Acquired = list[tuple[str, int, tuple[str, ...]]]


def soon() -> int:
    return time.monotonic_ns() + 60 * SECOND


def fill(index: int, payload: npt.NDArray[np.uint8]) -> None:
    payload[:] = index % 251


def check(index: int, payload: npt.NDArray[np.uint8]) -> None:
    assert np.all(payload == index % 251)


@pytest.fixture
def acquired(monkeypatch: pytest.MonkeyPatch) -> Acquired:
    """(address, number of keys, whom to fetch from) of each acquire, as they are sent."""
    asked: Acquired = []
    real = PoolRpc.acquire

    async def noted(self: PoolRpc, owner: str, lease_ms: int, keys: Any, timeout_s: float, **options: Any) -> Any:
        asked.append((self.address, len(keys), tuple(options.get("fetch_from", ()))))
        return await real(self, owner, lease_ms, keys, timeout_s, **options)

    monkeypatch.setattr(PoolRpc, "acquire", noted)
    return asked


async def test_copy_on_this_host_is_read_before_one_elsewhere(cluster: PoolCluster, namespace: Namespace, acquired: Acquired) -> None:
    """Memory is nearer than the network, whoever is first in rank."""
    cluster.configure(copies=2)
    await cluster.add(host="far")
    here = await cluster.add(host=host_boot_id())
    async with await AsyncPoolClient.open(cluster.membership, namespace, transport="grpc") as client:
        chain = client.keys(TOKENS)
        assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
        assert await client.load(chain, 0, COUNTS, check, deadline_ns=soon()) == BLOCKS
    assert acquired == [(here.relay.address, BLOCKS, ())]


async def test_node_of_this_host_is_asked_to_fetch_what_others_own(cluster: PoolCluster, namespace: Namespace, acquired: Acquired) -> None:
    """It is told from whom; where it can't, the owner is asked directly and nothing is lost. Without near copies nobody is bothered."""
    far, here = await cluster.add(host="far"), await cluster.add(host=host_boot_id())
    async with await AsyncPoolClient.open(cluster.membership, namespace, transport="grpc") as client:
        chain = client.keys(TOKENS)
        assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
        elsewhere = sum(await far.holds(chain))
        assert await client.load(chain, 0, COUNTS, check, deadline_ns=soon()) == BLOCKS
        assert (here.relay.address, elsewhere, (far.id,)) in acquired
        assert (here.relay.address, BLOCKS - elsewhere, ()) in acquired
        assert (far.relay.address, elsewhere, ()) in acquired  # this node has no way to the others
        acquired.clear()
        cluster.configure(near_copies=False)
        assert await client.load(chain, 0, COUNTS, check, deadline_ns=soon()) == BLOCKS
        assert sorted(acquired) == sorted([(here.relay.address, BLOCKS - elsewhere, ()), (far.relay.address, elsewhere, ())])


async def test_blocks_of_a_far_node_are_kept_near_and_outlive_it(cluster: PoolCluster, namespace: Namespace, tmp_path: Path) -> None:
    """The first read brings them over, after that this host needs the far node no more."""
    nodes = [
        PoolNode(
            NodeConfig(
                node_id=f"{number:032x}",
                capacity_bytes=16 * MIB,
                offers=("shm", "grpc"),
                arena_directory=tmp_path,
                place=NodePlace(weight=1.0, host=host),
            ),
            cluster.membership,
        )
        for number, host in ((1, "far"), (2, host_boot_id()))
    ]
    for node in nodes:
        await node.start()
    far, here = nodes
    try:
        async with asyncio.timeout(60):
            while [member.info["state"] for member in cluster.membership.members("node")] != ["active"] * 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with await AsyncPoolClient.open(cluster.membership, namespace, transport="grpc") as client:
            chain = client.keys(TOKENS)
            assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
            rpc = PoolRpc(here.address)
            assert 0 < sum(map(bool, await rpc.lookup(chain, 10))) < BLOCKS
            assert await client.load(chain, 0, COUNTS, check, deadline_ns=soon()) == BLOCKS
            async with asyncio.timeout(30):
                while not all(await rpc.lookup(chain, 10)):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await rpc.close()
            await far.stop()
            assert await client.load(chain, 0, COUNTS, check, deadline_ns=soon()) == BLOCKS
    finally:
        for node in nodes:
            await node.stop()
