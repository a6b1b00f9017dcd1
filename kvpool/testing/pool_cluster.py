"""Several real nodes in this process, members of an in-memory cluster; a test decides what they say and how the network treats them."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvpool.cluster import Registration, open_membership
from kvpool.cluster.config import ClusterConfig
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.request.pool import NodeDescription
from kvpool.testing.membership_kit import until
from kvpool.testing.relay import Relay
from kvpool.units import MIB
from kvpool.wire.pool_client import PoolRpc


class Spot:
    """One node and its way to the clients: `relay` breaks it, `say` changes its record."""

    def __init__(self, node: PoolNode, relay: Relay, registration: Registration) -> None:
        self.node, self.relay, self.registration = node, relay, registration
        self.id = node.node_id

    async def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` this node has, asked past the relay."""
        rpc = PoolRpc(self.node.address)
        try:
            return [bool(bit) for bit in await rpc.lookup(keys, 10)]
        finally:
            await rpc.close()

    async def describe(self) -> NodeDescription:
        """The node's books, asked past the relay."""
        rpc = PoolRpc(self.node.address)
        try:
            return await rpc.describe(10)
        finally:
            await rpc.close()


class PoolCluster:
    """Nodes that come by `add`. Their ids are numbers from 1 on, so that placement is the same in every run."""

    def __init__(self, directory: Path, capacity_bytes: int = 16 * MIB) -> None:
        self.spots: list[Spot] = []
        self.url = f"memory://{uuid.uuid4().hex}"
        self.membership = open_membership(self.url)
        self._directory = directory
        self._capacity_bytes = capacity_bytes

    @property
    def config(self) -> ClusterConfig:
        """As the clients see it."""
        return self.membership.config

    def configure(self, **settings: int | bool) -> None:
        """Change the cluster's config."""
        self.membership.configure(lambda config: replace(config, **settings))  # type: ignore[arg-type]

    async def add(self, **info: str) -> Spot:
        """One more node, whose record holds `info`."""
        config = NodeConfig(
            node_id=f"{len(self.spots) + 1:032x}",
            capacity_bytes=self._capacity_bytes,
            offers=("shm", "grpc"),
            arena_directory=self._directory,
        )
        node = PoolNode(config)
        await node.start()
        relay = Relay(node.address)
        await relay.start()
        record = {"incarnation": str(node.incarnation), **info}
        registration = self.membership.join(role="node", address=relay.address, id=node.node_id, info=record)
        spot = Spot(node, relay, registration)
        self.spots.append(spot)
        until(self.membership, lambda view: spot.id in {member.id for member in view})
        return spot

    def say(self, spot: Spot, **info: str) -> None:
        """The node says something else of itself, and everybody has heard it."""
        record = {**spot.registration.member.info, **info}
        spot.registration.update(record)
        until(self.membership, lambda view: record in [member.info for member in view if member.id == spot.id])

    def leave(self, spot: Spot) -> None:
        """The node is no member any more, and everybody knows."""
        spot.registration.close()
        until(self.membership, lambda view: spot.id not in {member.id for member in view})

    async def stop(self) -> None:
        """Stop all nodes."""
        for spot in self.spots:
            await spot.relay.stop()
            await spot.node.stop()
        self.membership.close()
