"""Real nodes in one process that share a cluster in memory, and a client that stores and loads chains in it."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey, Namespace
from kvpool.client import AsyncPoolClient
from kvpool.cluster import Membership, open_membership
from kvpool.node.balancer import BalanceSettings
from kvpool.node.cluster import ClusterSide, NodePlace
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.policy.placement import NodeState, write_targets
from kvpool.pool import PoolState
from kvpool.request.admin import Balance
from kvpool.request.pool import NEAR
from kvpool.units import SECOND
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.fence import NodeIdentity

from .conftest import GEOMETRY, SIZE

NAMESPACE = Namespace(model="m", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none")
BLOCK_TOKENS = 16
EXTENT_BLOCKS = 4
LIMIT_S = 30.0
QUICK = BalanceSettings(repair_s=0.5, news_s=0.3)


class Cluster:
    """`await node()` adds a node; `client` is opened by `open`. `await close()` checks every node's books."""

    def __init__(self, directory: Path) -> None:
        self.name = f"rig-{uuid.uuid4().hex[:8]}"
        self.url = f"memory://{self.name}"
        self.nodes: dict[str, PoolNode] = {}
        self._directory = directory
        self._memberships: dict[str, Membership] = {}
        self._own = open_membership(self.url)
        self.client: AsyncPoolClient

    async def open(self, count: int, **config: Any) -> None:
        """`count` active nodes and a client. `config`: of the cluster."""
        config = {"extent_tokens": BLOCK_TOKENS * EXTENT_BLOCKS, **config}
        await asyncio.to_thread(self._own.configure, lambda old: replace(old, **config))
        for index in range(count):
            await self.node(f"{index:032x}")
        if count:
            await self.settled()
        self.client = await AsyncPoolClient.open(self.url, NAMESPACE)

    async def node(self, node_id: str, *, blocks: int = 2000, **more: Any) -> PoolNode:
        """One more node; back when it is a member."""
        config = NodeConfig(
            capacity_bytes=blocks * SIZE,
            node_id=node_id,
            arena_directory=self._directory,
            offers=("shm", "grpc"),
            balance=more.pop("balance", QUICK),
            place=more.pop("place", NodePlace(weight=1.0)),
            **more,
        )
        membership = self._memberships[node_id] = open_membership(self.url)
        node = self.nodes[node_id] = PoolNode(config, membership)
        await node.start()
        return node

    async def configure(self, **config: Any) -> None:
        """Change the cluster's config."""
        await asyncio.to_thread(self._own.configure, lambda old: replace(old, **config))

    async def stop(self, node_id: str) -> None:
        """A node leaves; its books must balance."""
        node = self.nodes.pop(node_id)
        self.pool(node).check()
        await node.stop()
        self._memberships.pop(node_id).close()

    async def crash(self, node_id: str) -> None:
        """A node ends without a word: nobody hears from it until its lease runs out."""
        node = self.nodes.pop(node_id)
        side = self.side(node)
        assert side.registration is not None
        side.registration.abandon()
        await node.stop()
        self._memberships.pop(node_id).close()

    async def settled(self, *, state: NodeState | None = None) -> None:
        """All nodes know each other, are active (or in `state`), hold what they should and have let go of the rest."""
        last = -1.0
        async with asyncio.timeout(LIMIT_S):
            while True:
                sides = [self.side(node) for node in self.nodes.values()]
                rounds = min((side.balancer.counters["rounds"] for side in sides), default=0)
                at_rest = all(
                    (report := side.balancer.report()).settled
                    and report.state in (NodeState.ACTIVE, state)
                    and {ref.node_id for ref in side.links.nodes()} == set(self.nodes)
                    for side in sides
                )
                if not at_rest:
                    last = -1.0
                elif last < 0:
                    last = rounds
                elif rounds >= last + 3:  # settled for three more rounds, the last of them on old news
                    return
                await asyncio.sleep(0.02)

    async def store(self, chains: Sequence[Sequence[BlockKey]], **more: Any) -> None:
        """Put whole chains in; each payload says which block it is."""
        for chain in chains:

            def fill(index: int, payload: npt.NDArray[np.uint8], chain: Sequence[BlockKey] = chain) -> None:
                payload[:] = chain[index][0]

            counts = [BLOCK_TOKENS] * len(chain)
            held = await self.client.store(chain, 0, counts, fill, deadline_ns=time.monotonic_ns() + 10 * SECOND, **more)
            assert held == len(chain)

    async def load(self, chain: Sequence[BlockKey]) -> int:
        """How many leading blocks come, whole and right."""

        def sink(index: int, payload: npt.NDArray[np.uint8]) -> None:
            assert np.all(payload == chain[index][0])

        counts = [BLOCK_TOKENS] * len(chain)
        return await self.client.load(chain, 0, counts, sink, deadline_ns=time.monotonic_ns() + 10 * SECOND)

    def chains(self, count: int, blocks: int = 8, *, first: int = 0) -> list[list[BlockKey]]:
        """Chains of their own, the same in every run."""
        return [self.client.keys([number] * BLOCK_TOKENS * blocks) for number in range(first, first + count)]

    def holders(self, key: BlockKey, *, near: bool = False) -> set[str]:
        """Nodes that hold a block in their own right, or (`near`) as a near copy."""
        wanted = NEAR if near else 1
        return {name for name, node in self.nodes.items() if self.pool(node).lookup([key], time.monotonic_ns())[0] == wanted}

    def misplaced(self, chains: Sequence[Sequence[BlockKey]], copies: int = 1) -> int:
        """Blocks that are not on exactly the nodes where they belong."""
        placed = [ref.placed for ref in self.side(next(iter(self.nodes.values()))).links.nodes()]
        wrong = 0
        for chain in chains:
            for index, key in enumerate(chain):
                head = chain[index - index % EXTENT_BLOCKS]
                wrong += self.holders(key) != set(write_targets(head, placed, copies))
        return wrong

    async def drain(self, node_id: str, *, cancel: bool = False, bytes_per_s: int = 0) -> Balance:
        """As the operator's command does it."""
        node = self.nodes[node_id]
        rpc = AdminRpc(node.address, NodeIdentity(node.node_id, node.incarnation))
        try:
            report = await rpc.drain(LIMIT_S, cancel=cancel, bytes_per_s=bytes_per_s)
            async with asyncio.timeout(LIMIT_S):
                while not cancel and not report.settled:
                    await asyncio.sleep(0.05)
                    report = await rpc.balance(LIMIT_S)
            return report
        finally:
            await rpc.close()

    def counters(self, node_id: str) -> dict[str, int]:
        """Of a node's cluster side."""
        return self.side(self.nodes[node_id]).counted()

    @staticmethod
    def pool(node: PoolNode) -> PoolState:
        """A node's core."""
        assert node.pool is not None
        return node.pool

    @staticmethod
    def side(node: PoolNode) -> ClusterSide:
        """A node's part in the cluster."""
        assert node.cluster is not None
        return node.cluster

    async def close(self) -> None:
        """Stop everything."""
        if hasattr(self, "client"):
            await self.client.close()
        for node_id in list(self.nodes):
            await self.stop(node_id)
        self._own.close()


class Load:
    """Loads chains again and again in the background; `short` are the loads that came back with less than everything."""

    def __init__(self, cluster: Cluster, chains: Sequence[Sequence[BlockKey]]) -> None:
        self._cluster = cluster
        self._chains = chains
        self.loads = 0
        self.short = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            for chain in self._chains:
                self.short += await self._cluster.load(chain) < len(chain)
                self.loads += 1

    async def stop(self) -> None:
        """End; what went wrong in it is raised here."""
        self._task.cancel()
        (outcome,) = await asyncio.gather(self._task, return_exceptions=True)
        if not isinstance(outcome, asyncio.CancelledError):
            raise AssertionError("the load ended early") from outcome
