"""A node's place in its cluster: what it says about itself, and how it passes from joining to active, to draining, to gone.

A node that finds an active one when it joins is *joining*: others write to it and ask it, but it hasn't got yet what was there before it.
So is one that finds nobody and hears of an older one soon after: a store that forgot its members names none of them before their next
heartbeat. It becomes active when all others that may hold something of its say that they have nothing left to push to it, or after
`handover_s` at the latest: then what is still missing is pushed all the same, and whoever asks meanwhile finds it with its former owner
or not at all.
"""

import asyncio
import logging
from collections.abc import Mapping

from kvpool.client.links import Links
from kvpool.client.sources import NodeRef
from kvpool.clock import Clock
from kvpool.cluster import Member, Registration
from kvpool.errors import KvpoolError
from kvpool.policy.placement import NodeState
from kvpool.units import SECOND
from kvpool.wire.credentials import Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.peer_client import PeerRpc

log = logging.getLogger(__name__)

_ASK_S = 1.0
_PAUSE_S = 0.1


def first_state(me: str, members: tuple[Member, ...]) -> NodeState:
    """How a node begins: active when there is nobody who could have something for it."""
    others = [member for member in members if member.role == "node" and member.id != me]
    able = any(member.info.get("state", NodeState.ACTIVE) in (NodeState.ACTIVE, NodeState.DRAINING) for member in others)
    return NodeState.JOINING if able else NodeState.ACTIVE


class Standing:
    """What `registration` says of this node; `info` is the rest of it."""

    def __init__(
        self, me: NodeIdentity, registration: Registration, info: Mapping[str, str], state: NodeState, links: Links, clock: Clock,
        security: Security,
    ) -> None:  # fmt: skip
        self.me = me
        self.state = state
        self._registration = registration
        self._info = dict(info)
        self._links = links
        self._clock = clock
        self._security = security

    def change(self, state: NodeState) -> None:
        """Say so from now on. Doesn't wait."""
        if state != self.state:
            log.info("node %s is %s", self.me.node_id, state)
            self.state = state
            self._registration.update({**self._info, "state": state})

    async def hand_over(self, news_s: float) -> None:
        """While joining: wait until everybody has pushed what is this node's, at most the cluster's `handover_s`; then be active.

        `news_s`: within so long all who were there before are known.
        """
        await self._look_around(news_s)
        began_ns = self._clock.now_ns()
        rpcs: dict[NodeRef, PeerRpc] = {}
        try:
            while self.state is NodeState.JOINING:
                over = self._clock.now_ns() - began_ns >= self._links.config.handover_s * SECOND
                if over:
                    log.warning("node %s becomes active before it has all that is its", self.me.node_id)
                if over or await self._all_handed_over(rpcs):
                    if self.state is NodeState.JOINING:  # nobody has begun to drain it meanwhile
                        self.change(NodeState.ACTIVE)
                    return
                await asyncio.sleep(_PAUSE_S)
        finally:
            await asyncio.gather(*(rpc.close() for rpc in rpcs.values()))

    async def _look_around(self, news_s: float) -> None:
        """Whoever turns out to have been there before makes this node a newcomer."""
        end_ns = self._clock.now_ns() + int(news_s * SECOND)
        while self.state is NodeState.ACTIVE and self._clock.now_ns() < end_ns:
            if any(ref.incarnation < self.me.incarnation for ref in self._others()):
                self.change(NodeState.JOINING)
            await asyncio.sleep(_PAUSE_S)

    async def _all_handed_over(self, rpcs: dict[NodeRef, PeerRpc]) -> bool:
        try:
            return all(await asyncio.gather(*(self._handed_over(rpcs, ref) for ref in self._others())))
        except Exception:
            log.exception("asking the others what they have for this node failed")
            return False

    def _others(self) -> list[NodeRef]:
        """Nodes that may have something for this one."""
        able = (NodeState.ACTIVE, NodeState.DRAINING)
        return [ref for ref in self._links.nodes() if ref.node_id != self.me.node_id and ref.placed.state in able]

    async def _handed_over(self, rpcs: dict[NodeRef, PeerRpc], ref: NodeRef) -> bool:
        rpc = rpcs.get(ref)
        if rpc is None:
            rpc = rpcs[ref] = PeerRpc(ref.address, NodeIdentity(ref.node_id, ref.incarnation), self._security)
        try:
            return await rpc.handed_over(self.me, _ASK_S)
        except KvpoolError as error:
            log.info("node %s doesn't say whether it has something for us: %s", ref.node_id[:8], error)
            return False
