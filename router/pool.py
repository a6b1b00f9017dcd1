"""The pool as the router sees it: which leading blocks of a chain are there, asked of their owners, one call per node.

Ownership is computed from the view of live nodes, by the same rule the workers' clients use. No data path is opened.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from kvpool.block import BlockKey
from kvpool.client.plan import by_node, leading, owners_of
from kvpool.policy.placement import PlacedNode
from router.fleet import ClusterView


class NodePort(Protocol):
    """A control connection to one node (`kvpool.wire.pool_client.PoolRpc`)."""

    async def lookup(self, keys: Sequence[bytes], timeout_s: float) -> bytes:
        """One byte a key, 1 when the node holds it. Raises kvpool errors."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


class _Link:
    """A connection and how many calls are using it."""

    def __init__(self, port: NodePort) -> None:
        self.port = port
        self.users = 0


class NodesProbe:
    """A `PoolProbe` over the cluster's live nodes. Lives on one event loop."""

    def __init__(self, view: ClusterView, connect: Callable[[str], NodePort]) -> None:
        """`connect` makes a port from host:port."""
        self._view = view
        self._connect = connect
        self._links: dict[tuple[str, int], _Link] = {}

    async def longest_prefix(self, keys: Sequence[BlockKey], block_tokens: int, timeout_s: float) -> int:
        """How many leading `keys` the nodes hold; 0 without nodes. Raises a `RemoteError` when one of them can't say in time."""
        nodes = {member.id: member for member in self._view.members("node")}
        await self._drop_all_but({(member.id, member.incarnation) for member in nodes.values()})
        if not nodes or not keys:
            return 0
        groups = by_node(owners_of(keys, 0, len(keys), block_tokens, [PlacedNode(id=node_id) for node_id in nodes]))
        present = bytearray(len(keys))

        async def ask(node_id: str, positions: Sequence[int]) -> None:
            link = self._link(node_id, nodes[node_id].incarnation, nodes[node_id].address)
            link.users += 1
            try:
                answer = await link.port.lookup([keys[i] for i in positions], timeout_s)
            finally:
                link.users -= 1
            for position, bit in zip(positions, answer, strict=True):
                present[position] = bit

        await asyncio.gather(*(ask(node_id, positions) for node_id, positions in groups.items()))
        return leading(present)

    async def close(self) -> None:
        """Disconnect from all nodes."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.port.close() for link in links))

    def _link(self, node_id: str, incarnation: int, address: str) -> _Link:
        key = node_id, incarnation
        if key not in self._links:
            self._links[key] = _Link(self._connect(address))
        return self._links[key]

    async def _drop_all_but(self, alive: set[tuple[str, int]]) -> None:
        """Disconnect from nodes that left, unless a call is still waiting for one."""
        gone = [key for key, link in self._links.items() if key not in alive and link.users == 0]
        await asyncio.gather(*(link.port.close() for link in [self._links.pop(key) for key in gone]))
