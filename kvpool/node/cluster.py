"""What makes a node part of a cluster: its place among the others, and all that it does with them.

`ClusterSide` only puts the parts together, starts and stops them: connections to the other nodes, near copies, the balancer, hot extents.
"""

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvpool.client.links import Links
from kvpool.client.sources import MembershipSource
from kvpool.clock import Clock
from kvpool.cluster import Membership, Registration
from kvpool.node.balancer import Balancer, BalanceSettings
from kvpool.node.handler import NodeHandler
from kvpool.node.heat import Heat
from kvpool.node.inventory import Inventory
from kvpool.node.near import NearCopies
from kvpool.node.peers import Peers
from kvpool.node.pushing import Pusher
from kvpool.node.standing import Standing, first_state
from kvpool.node.tiers import Tiers
from kvpool.policy.bucket import TokenBucket
from kvpool.pool import PoolState
from kvpool.tier import Arena
from kvpool.transport import host_boot_id
from kvpool.units import GIB
from kvpool.wire.credentials import Security
from kvpool.wire.fence import NodeIdentity

log = logging.getLogger(__name__)

_THREADS = 4
_TEND_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """Where a node stands. `weight` None: its capacity in GiB. `host` None: this machine, by its boot id. `rack`, `zone`: "" if unknown."""

    weight: float | None = None
    host: str | None = None
    rack: str = ""
    zone: str = ""

    def info(self, capacity_bytes: int) -> dict[str, str]:
        """As the members see it."""
        weight = capacity_bytes / GIB if self.weight is None else self.weight
        host = host_boot_id() if self.host is None else self.host
        return {"weight": repr(weight), "host": host, "rack": self.rack, "zone": self.zone}


class ClusterSide:
    """The cluster side of one node. Made before the node serves, `await join(...)` once it does.

    `ask_heads`: whether it asks others for the extents of blocks whose chain is broken here.
    """

    def __init__(
        self,
        me: NodeIdentity,
        membership: Membership,
        handler: NodeHandler,
        pool: PoolState,
        arena: Arena,
        tiers: Tiers,
        clock: Clock,
        *,
        settings: BalanceSettings,
        security: Security,
        ask_heads: bool = False,
    ) -> None:
        self._me = me
        self._membership = membership
        self._security = security
        self._clock = clock
        self._handler = handler
        self._threads = ThreadPoolExecutor(_THREADS, "kvpool-peers")
        self._news_s = settings.news_s
        self.registration: Registration | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.links = Links(MembershipSource(membership, owned=False), "auto", security)
        inventory = Inventory(pool, arena, tiers)
        bucket = TokenBucket(self.links.config.rebalance_bytes_per_s, clock.now_ns())
        self.pusher = Pusher(pool, arena, tiers, clock, self.links, self._threads, bucket, handler)
        self.near = NearCopies(me.node_id, pool, arena, tiers, clock, self.links, self._threads)
        self.heat = Heat(me.node_id, pool, inventory, self.pusher, clock, self.links)
        self._peers = Peers(me.node_id, self.links, security) if ask_heads else None
        self.balancer = Balancer(
            me, handler, pool, tiers, inventory, self.pusher, clock, self.links, self._peers, lambda: membership.connected, settings
        )

    async def join(self, address: str, info: Mapping[str, str]) -> Registration:
        """Become a member with `info` and begin. Raises `UnavailableError` when the store can't be reached."""
        state = first_state(self._me.node_id, self._membership.members("node"))
        own = {"incarnation": str(self._me.incarnation), **info}
        self.registration = registration = await asyncio.to_thread(
            self._membership.join, role="node", address=address, id=self._me.node_id, info={**own, "state": state}
        )
        standing = Standing(self._me, registration, own, state, self.links, self._clock, self._security)
        self.balancer.start(standing)
        self.heat.start()
        self._handler.near, self._handler.on_read = self.near, self.heat.read
        self._handler.counted = self.counted
        self._handler.leaving = lambda: self.balancer.closed
        self._tasks = [asyncio.create_task(standing.hand_over(self._news_s)), asyncio.create_task(self._tend())]
        return registration

    async def leave(self) -> None:
        """Be a member no more: others see it within a poll."""
        if self.registration is not None:
            await asyncio.to_thread(self.registration.close)

    async def stop(self) -> None:
        """End all that goes on with other nodes; closing the connections ends transfers that wait for somebody."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self.balancer.stop(), self.heat.stop(), self.near.close())
        if self._peers is not None:
            await self._peers.close()
        await self.links.close()
        self._threads.shutdown(wait=True)

    def counted(self) -> dict[str, int]:
        """Totals since the start."""
        return {**self.balancer.counters, **self.pusher.counters, **self.near.counters, **self.heat.counters}

    async def _tend(self) -> None:
        """Let go of nodes that are gone, look after those that are ill."""
        while True:
            await self.links.prune()
            await self.links.care()
            await asyncio.sleep(_TEND_S)
