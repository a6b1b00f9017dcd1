"""The pool as the router sees it: which leading blocks of a chain are there, asked in rounds of those that may hold them.

Whom to ask is computed from the view of live nodes, by the same rule the workers' clients use: the owner first, one call per node,
then for what it lacks, or when it fails, the next. No data path is opened.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from kvpool.block import BlockKey
from kvpool.client.plan import leading, placements
from kvpool.cluster import Member
from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import Identity
from kvpool.errors import RemoteError
from kvpool.policy.placement import PlacedNode, node_from_info
from router.nodes import NodeLinks

ROUNDS = 3
"""Nodes that are asked for one block at most."""


class PoolView(Protocol):
    """What is needed of `kvpool.cluster.Membership`."""

    def members(self, role: str | None = None) -> tuple[Member, ...]:
        """The last known view; never blocks."""
        ...

    def quarantined(self) -> frozenset[Identity]:
        """Those that can't be reached; never blocks."""
        ...

    @property
    def config(self) -> ClusterConfig:
        """What the cluster agrees on; never blocks."""
        ...


class NodePort(Protocol):
    """A control connection to one node (`kvpool.wire.pool_client.PoolRpc`)."""

    async def lookup(self, keys: Sequence[bytes], timeout_s: float) -> bytes:
        """One byte a key, 1 when the node holds it. Raises kvpool errors."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


def placed_nodes(view: PoolView) -> list[PlacedNode]:
    """The live nodes as placement sees them, by id."""
    ill = view.quarantined()
    return sorted(node_from_info(m.id, m.info, quarantined=m.identity in ill) for m in view.members("node"))


def orders_of(view: PoolView, keys: Sequence[BlockKey], block_tokens: int) -> list[tuple[str, ...]]:
    """Ids of the nodes to ask for each of `keys`, a whole chain, the likeliest first.

    Of a namespace with fewer copies than the most, the last in order just hold nothing.
    """
    config = view.config
    copies = max((config.copies, *config.namespace_copies.values()))
    return [one.order for one in placements(keys, 0, len(keys), block_tokens, config.extent_tokens, placed_nodes(view), copies)]


class NodesProbe:
    """A `PoolProbe` over the cluster's live nodes. Lives on one event loop."""

    def __init__(self, view: PoolView, connect: Callable[[str], NodePort]) -> None:
        """`connect` makes a port from host:port."""
        self._view = view
        self._links = NodeLinks[NodePort](lambda member: connect(member.address))

    async def longest_prefix(self, keys: Sequence[BlockKey], block_tokens: int, timeout_s: float) -> int:
        """How many leading `keys` the nodes hold; 0 without nodes. Raises a `RemoteError` when one of them can't say in time."""
        nodes = {member.id: member for member in self._view.members("node")}
        orders = orders_of(self._view, keys, block_tokens) if nodes else []
        await self._links.keep({(member.id, member.incarnation) for member in nodes.values()})
        if not nodes or not keys:
            return 0
        answers: list[bool | RemoteError] = [False] * len(keys)

        async def ask(node_id: str, positions: Sequence[int]) -> None:
            try:
                async with self._links.use(nodes[node_id]) as port:
                    present = await port.lookup([keys[i] for i in positions], timeout_s)
            except RemoteError as error:
                for position in positions:
                    answers[position] = error
                return
            for position, bit in zip(positions, present, strict=True):
                answers[position] = bool(bit)

        for round_ in range(ROUNDS):
            groups: dict[str, list[int]] = {}
            for position, order in enumerate(orders):
                if answers[position] is not True and round_ < len(order):
                    groups.setdefault(order[round_], []).append(position)
            await asyncio.gather(*(ask(node_id, positions) for node_id, positions in groups.items()))
        known = leading([answer is True for answer in answers])
        end = answers[known] if known < len(keys) else False
        if isinstance(end, RemoteError):
            raise end
        return known

    async def close(self) -> None:
        """Disconnect from all nodes."""
        await self._links.close()
