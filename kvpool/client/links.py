"""Connections to the nodes: opened once per (node, incarnation), shared by all calls, given up and re-opened when they fail.

A node that fails to answer is left alone for a while (`health.py` says how long), so a dead node costs one failed call, not one per block;
one that keeps failing is probed by connecting to it anew, and reported to the cluster as long as it is ill. A reach that fails
while `auto` is set is skipped for `_REACH_COOLDOWN_NS`: the next call takes the next best one, visibly (log, status).
"""

import asyncio
import logging
import time
from dataclasses import dataclass

from kvpool.client.choose import AUTO, check_transport, open_reach
from kvpool.client.health import FAIR_NS, Health, Plane
from kvpool.client.sources import NodeRef, NodeSource
from kvpool.cluster.config import ClusterConfig
from kvpool.errors import AccessError, ClosedError, DeadlineError, LimitError, RemoteError, UnavailableError
from kvpool.transport import Reach
from kvpool.units import SECOND
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

log = logging.getLogger(__name__)

_REACH_COOLDOWN_NS = 30 * SECOND
_LOOK_S = 1.0
_PROBE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """An open connection: control plane and bytes."""

    node: NodeRef
    rpc: PoolRpc
    reach: Reach


class Links:
    """The open connections of one client. Lives on one event loop."""

    def __init__(self, source: NodeSource, transport: str, security: Security = PLAIN) -> None:
        self._source = source
        self._security = security
        self._transport = check_transport(transport)
        self._open: dict[NodeRef, asyncio.Task[NodeLink]] = {}
        self.health: Health[NodeRef] = Health()
        self._reported: set[NodeRef] = set()
        self._skip_until_ns: dict[tuple[str, str], int] = {}
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    def nodes(self) -> tuple[NodeRef, ...]:
        """The live nodes as last known: those that own blocks."""
        return self._source.nodes()

    @property
    def config(self) -> ClusterConfig:
        """What the cluster agrees on, as last known."""
        return self._source.config

    def resting(self, ref: NodeRef) -> bool:
        """True for a while after `ref` failed: it still owns its blocks, but is not asked."""
        return self.health.resting(ref, time.monotonic_ns())

    def connected(self, ref: NodeRef) -> bool:
        """True when the connection to `ref` is open."""
        task = self._open.get(ref)
        return task is not None and task.done()

    def slow(self, ref: NodeRef) -> bool:
        """True while a call to `ref` takes longer than it should: others are asked first."""
        return self.health.overdue(ref, time.monotonic_ns())

    async def prune(self) -> None:
        """Disconnect from nodes that are gone: a mapping that stays open keeps a dead node's memory from its host."""
        live = set(self._source.nodes())
        gone = [self._open.pop(ref) for ref in list(self._open) if ref not in live]
        await asyncio.gather(*(_discard(task) for task in gone))

    async def care(self) -> None:
        """Probe the nodes that are ill and have rested, and tell the cluster who is ill and who no longer is."""
        live = set(self._source.nodes())
        self.health.keep_only(live)

        async def probe(ref: NodeRef) -> None:
            try:
                await self.link(ref, _PROBE_S)
            except (RemoteError, ClosedError) as error:
                log.info("node %s doesn't answer its probe: %s", ref.node_id[:8], error)
                return
            log.info("node %s answers its probe and is asked again", ref.node_id[:8])
            self.health.probed(ref)

        await asyncio.gather(*map(probe, self.health.to_probe(time.monotonic_ns())))
        ill = set(self.health.ill())
        for ref in ill:
            self._source.report(ref, healthy=False)  # a report ends by itself, so it is repeated
        for ref in (self._reported - ill) & live:
            self._source.report(ref, healthy=True)
        self._reported = ill

    async def connect_all(self, timeout_s: float) -> list[str]:
        """Connect to every node there is, ahead of need: a first connection costs more than most transfers. Why some can't be had."""

        async def one(ref: NodeRef) -> str | None:
            try:
                await self.link(ref, timeout_s)
            except (RemoteError, ClosedError) as error:
                log.info("node %s at %s can't be connected to yet: %s", ref.node_id[:8], ref.address, error)
                return str(error)
            return None

        wanted = [ref for ref in self._source.nodes() if ref not in self._open and not self.resting(ref)]
        return [reason for reason in await asyncio.gather(*map(one, wanted)) if reason is not None]

    def look_again(self) -> None:
        """Ask for the current nodes anew, in the background: whoever noticed that a view is stale has a deadline to keep."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._source.refresh(_LOOK_S))

    def reaches(self) -> dict[str, str]:
        """Reach in use per node id, for the links that are open."""
        ready = [task for task in self._open.values() if task.done() and not task.cancelled() and task.exception() is None]
        return {task.result().node.node_id: task.result().reach.name for task in ready}

    async def link(self, ref: NodeRef, timeout_s: float) -> NodeLink:
        """The connection to `ref`, opened if need be. Raises `RemoteError` when that fails or takes longer."""
        if self._closed:
            raise ClosedError("this client was closed")
        task = self._open.get(ref)
        if task is None:
            task = asyncio.create_task(self._connect(ref))
            self._open[ref] = task
        try:
            return await asyncio.wait_for(asyncio.shield(task), timeout_s)
        except TimeoutError as error:
            await self.gave_up(ref, timeout_s)
            raise DeadlineError(f"node at {ref.address} took longer than {timeout_s:.2f} s to connect") from error
        except (AccessError, LimitError):
            self._open.pop(ref, None)
            self.late(ref)  # it answers, so nothing ails it: no failure in a row, and nothing to report
            raise
        except RemoteError:
            await self.failed(ref)
            raise
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling() or not task.cancelled():
                raise
            raise UnavailableError(f"the connection to the node at {ref.address} was given up by another call") from None

    async def failed(self, ref: NodeRef, plane: Plane = "control", *, reach: str | None = None) -> None:
        """Give up the connection to `ref`: one of its planes, or only its `reach`, failed."""
        now_ns = time.monotonic_ns()
        if reach is not None and self._transport == AUTO:
            self._skip_until_ns[ref.node_id, reach] = now_ns + _REACH_COOLDOWN_NS
        else:
            self.health.failed(ref, plane, now_ns)
        task = self._open.pop(ref, None)
        if task is not None:
            log.warning("node %s at %s: %s failed; giving the connection up", ref.node_id[:8], ref.address, reach or "it")
            await _discard(task)
        self._forget_the_gone()
        self.look_again()

    async def gave_up(self, ref: NodeRef, after_s: float) -> None:
        """A control call to `ref` was not answered in the time it had: a failure if that was fair, else it just rests."""
        if after_s * SECOND >= FAIR_NS:
            await self.failed(ref)
        else:
            self.late(ref)

    def late(self, ref: NodeRef) -> None:
        """`ref` had too little time: let it rest, keep the connection."""
        self.health.late(ref, time.monotonic_ns())

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        if self._looking is not None:
            await asyncio.wait([self._looking], timeout=_LOOK_S)
        tasks, self._open = list(self._open.values()), {}
        await asyncio.gather(*(_discard(task) for task in tasks))
        await self._source.close()

    async def _connect(self, ref: NodeRef) -> NodeLink:
        now_ns = time.monotonic_ns()
        skip = [name for (node_id, name), until in self._skip_until_ns.items() if node_id == ref.node_id and until > now_ns]
        rpc = PoolRpc(ref.address, NodeIdentity(ref.node_id, ref.incarnation), self._security)
        try:
            description = await rpc.describe(2.0)
            reach = await asyncio.to_thread(open_reach, description, ref.address, self._transport, skip=skip, security=self._security)
        except BaseException:
            await rpc.close()
            raise
        return NodeLink(node=ref, rpc=rpc, reach=reach)

    def _forget_the_gone(self) -> None:
        """Bound the books."""
        now_ns = time.monotonic_ns()
        self.health.keep_only(set(self._source.nodes()))
        self._skip_until_ns = {key: until for key, until in self._skip_until_ns.items() if until > now_ns}


async def _discard(task: "asyncio.Task[NodeLink]") -> None:
    """Close what `task` opened, or stop it from opening."""
    if not task.done():
        task.cancel()
    try:
        link = await task
    except (RemoteError, asyncio.CancelledError):
        return
    await asyncio.to_thread(link.reach.close)
    await link.rpc.close()
