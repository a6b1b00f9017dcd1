"""Where the list of pool nodes comes from: the cluster's membership, or fixed addresses."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.cluster import Membership, open_membership
from kvpool.errors import ConfigError, RemoteError
from kvpool.units import SECOND
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.pool_client import PoolRpc

_REFRESH_NS = SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRef:
    """One live node: identity (id, incarnation) and where its control plane listens."""

    node_id: str
    incarnation: int
    address: str


class NodeSource(Protocol):
    """The current nodes. `nodes()` never blocks; `refresh()` is called after a node failed to answer."""

    def nodes(self) -> tuple[NodeRef, ...]:
        """The last known nodes, sorted by id."""
        ...

    async def refresh(self, timeout_s: float) -> None:
        """Look again, within `timeout_s`; keeps the last view when that fails."""
        ...

    async def close(self) -> None:
        """Stop watching."""
        ...


class MembershipSource:
    """Nodes that have joined the cluster at `url`."""

    def __init__(self, membership: Membership, *, owned: bool) -> None:
        self._membership = membership
        self._owned = owned

    def nodes(self) -> tuple[NodeRef, ...]:
        """The membership's last view."""
        members = self._membership.members("node")
        return tuple(
            sorted(
                (NodeRef(node_id=m.id, incarnation=int(m.info["incarnation"]), address=m.address) for m in members),
                key=lambda ref: ref.node_id,
            )
        )

    async def refresh(self, timeout_s: float) -> None:
        """Nothing to do: the membership refreshes itself."""

    async def close(self) -> None:
        """Close the membership if this source opened it."""
        if self._owned:
            await asyncio.to_thread(self._membership.close)


class StaticSource:
    """Nodes at fixed addresses; asked for their identity at the start and after failures, at most once a second."""

    def __init__(self, addresses: Sequence[str], security: Security = PLAIN) -> None:
        self._security = security
        self._addresses = tuple(addresses)
        self._known: dict[str, NodeRef] = {}
        self._asked_ns = 0

    def nodes(self) -> tuple[NodeRef, ...]:
        """The nodes that have answered."""
        return tuple(sorted(self._known.values(), key=lambda ref: ref.node_id))

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
            self._known[address] = NodeRef(node_id=node.node_id, incarnation=node.incarnation, address=address)
        finally:
            await rpc.close()


async def open_source(source: str, timeout_s: float, security: Security = PLAIN) -> NodeSource:
    """`redis://…` or `memory://…` (a cluster), or `host:port[,host:port…]` (fixed nodes)."""
    if "://" in source:
        membership = await asyncio.to_thread(open_membership, source)
        return MembershipSource(membership, owned=True)
    addresses = [part.strip() for part in source.split(",") if part.strip()]
    if not addresses or any(":" not in part for part in addresses):
        raise ConfigError(f"not a pool: {source!r}; give a cluster URL (redis://host:port/0) or host:port[,host:port]")
    static = StaticSource(addresses, security)
    await static.refresh(timeout_s)
    return static
