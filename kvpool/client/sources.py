"""Where the list of pool nodes comes from: the cluster's membership, or fixed addresses."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.cluster import Membership, open_membership
from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import Member
from kvpool.errors import ConfigError, RemoteError
from kvpool.policy.placement import PlacedNode, node_from_info
from kvpool.units import SECOND
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.pool_client import PoolRpc

_REFRESH_NS = SECOND
_ROLE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRef:
    """One live node: identity (id, incarnation) and where its control plane listens. What else is known of it may change.

    `placed` is what placement needs to know; `membership` the incarnation under which it is a member, 0 without membership.
    """

    node_id: str
    incarnation: int
    address: str
    placed: PlacedNode = field(compare=False)
    membership: int = field(default=0, compare=False)


class NodeSource(Protocol):
    """The current nodes. `nodes()` never blocks; `refresh()` is called after a node failed to answer."""

    def nodes(self) -> tuple[NodeRef, ...]:
        """The last known nodes, sorted by id."""
        ...

    @property
    def config(self) -> ClusterConfig:
        """What the cluster agrees on, as last known. Never blocks."""
        ...

    def report(self, node: NodeRef, *, healthy: bool) -> None:
        """Tell the cluster that the data path to `node` is broken, or works again. Doesn't wait."""
        ...

    async def refresh(self, timeout_s: float) -> None:
        """Look again, within `timeout_s`; keeps the last view when that fails."""
        ...

    async def close(self) -> None:
        """Stop watching."""
        ...


class MembershipSource:
    """Nodes that have joined a cluster."""

    def __init__(self, membership: Membership, *, owned: bool) -> None:
        self._membership = membership
        self._owned = owned
        self._seen: tuple[object, object] = (), frozenset()
        self._nodes: tuple[NodeRef, ...] = ()

    def nodes(self) -> tuple[NodeRef, ...]:
        """The membership's last view."""
        seen = members, quarantined = self._membership.members(_ROLE), self._membership.quarantined()
        if seen != self._seen:
            refs = (_ref(member, quarantined=member.identity in quarantined) for member in members)
            self._nodes = tuple(sorted((ref for ref in refs if ref is not None), key=lambda ref: ref.node_id))
            self._seen = seen
        return self._nodes

    @property
    def config(self) -> ClusterConfig:
        """The cluster's."""
        return self._membership.config

    def report(self, node: NodeRef, *, healthy: bool) -> None:
        """Report in the name of those that joined through this membership; without any it is nobody's business."""
        self._membership.report(_ROLE, node.node_id, node.membership, healthy)

    async def refresh(self, timeout_s: float) -> None:
        """Nothing to do: the membership refreshes itself."""

    async def close(self) -> None:
        """Close the membership if this source opened it."""
        if self._owned:
            await asyncio.to_thread(self._membership.close)


def _ref(member: Member, *, quarantined: bool) -> NodeRef | None:
    """The node that a member is; None when it doesn't say which life of it this is, since then no call could be meant for it."""
    incarnation = member.info.get("incarnation", "")
    if not (incarnation.isascii() and incarnation.isdecimal()):
        return None
    return NodeRef(
        node_id=member.id,
        incarnation=int(incarnation),
        address=member.address,
        placed=node_from_info(member.id, member.info, quarantined=quarantined),
        membership=member.incarnation,
    )


class StaticSource:
    """Nodes at fixed addresses; asked for their identity at the start and after failures, at most once a second."""

    def __init__(self, addresses: Sequence[str], config: ClusterConfig, security: Security = PLAIN) -> None:
        self.config = config
        self._security = security
        self._addresses = tuple(addresses)
        self._known: dict[str, NodeRef] = {}
        self._nodes: tuple[NodeRef, ...] = ()
        self._asked_ns = 0

    def nodes(self) -> tuple[NodeRef, ...]:
        """The nodes that have answered."""
        return self._nodes

    def report(self, node: NodeRef, *, healthy: bool) -> None:
        """Nobody to tell."""

    async def refresh(self, timeout_s: float) -> None:
        """Ask every address who it is."""
        if self._asked_ns and time.monotonic_ns() - self._asked_ns < _REFRESH_NS:
            return
        self._asked_ns = time.monotonic_ns()
        await asyncio.gather(*(self._ask(address, timeout_s) for address in self._addresses))

    async def close(self) -> None:
        """Nothing is held."""

    async def _ask(self, address: str, timeout_s: float) -> None:
        rpc = PoolRpc(address, security=self._security)
        try:
            node = await rpc.describe(timeout_s)
        except RemoteError:
            return  # keep the last view: the next failure at this address asks again
        else:
            placed = PlacedNode(node.node_id)
            self._known[address] = NodeRef(node_id=node.node_id, incarnation=node.incarnation, address=address, placed=placed)
            self._nodes = tuple(sorted(self._known.values(), key=lambda ref: ref.node_id))
        finally:
            await rpc.close()


async def open_source(source: str | Membership, timeout_s: float, security: Security = PLAIN, *, copies: int | None = None) -> NodeSource:
    """`redis://…` or `memory://…` (a cluster), a membership that is open already, or `host:port[,host:port…]` (fixed nodes).

    `copies` is for fixed nodes, 1 by default: a cluster has a config that says it.
    """
    if not isinstance(source, str) or "://" in source:
        if copies is not None:
            raise ConfigError("how many copies a cluster keeps is said by its config: kvpool config set copies N")
        owned = isinstance(source, str)
        membership = await asyncio.to_thread(open_membership, source) if isinstance(source, str) else source
        return MembershipSource(membership, owned=owned)
    addresses = [part.strip() for part in source.split(",") if part.strip()]
    if not addresses or any(":" not in part for part in addresses):
        raise ConfigError(f"not a pool: {source!r}; give a cluster URL (redis://host:port/0) or host:port[,host:port]")
    static = StaticSource(addresses, ClusterConfig(copies=1 if copies is None else copies), security)
    await static.refresh(timeout_s)
    return static
