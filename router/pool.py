"""The pool as the router sees it: which leading blocks of a chain are there, asked in rounds of those that may hold them.

Whom to ask is computed from the view of live nodes, by the same rule the workers' clients use: the owner first, one call per node,
then for what it lacks, or when it fails, the next. No data path is opened.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvpool.block import BlockKey
from kvpool.client.plan import leading, placements
from kvpool.cluster import Member
from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import Identity
from kvpool.errors import RemoteError
from kvpool.policy.placement import node_from_info

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


class _Link:
    """A connection and how many calls are using it."""

    def __init__(self, port: NodePort) -> None:
        self.port = port
        self.users = 0


class NodesProbe:
    """A `PoolProbe` over the cluster's live nodes. Lives on one event loop."""

    def __init__(self, view: PoolView, connect: Callable[[str], NodePort]) -> None:
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
        answers: list[bool | RemoteError] = [False] * len(keys)
        orders = self._orders(keys, block_tokens, nodes)

        async def ask(node_id: str, positions: Sequence[int]) -> None:
            link = self._link(node_id, nodes[node_id].incarnation, nodes[node_id].address)
            link.users += 1
            try:
                present = await link.port.lookup([keys[i] for i in positions], timeout_s)
            except RemoteError as error:
                for position in positions:
                    answers[position] = error
                return
            finally:
                link.users -= 1
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

    def _orders(self, keys: Sequence[BlockKey], block_tokens: int, nodes: Mapping[str, Member]) -> list[tuple[str, ...]]:
        """Whom to ask for each key. Of a namespace with fewer copies than the most, the last in order just hold nothing."""
        config, ill = self._view.config, self._view.quarantined()
        placed = [node_from_info(member.id, member.info, quarantined=member.identity in ill) for member in nodes.values()]
        copies = max((config.copies, *config.namespace_copies.values()))
        return [one.order for one in placements(keys, 0, len(keys), block_tokens, config.extent_tokens, placed, copies)]

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
