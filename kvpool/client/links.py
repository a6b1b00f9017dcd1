"""Connections to the nodes: opened once per (node, incarnation), shared by all calls, given up and re-opened when they fail.

A node that fails to answer is left alone for a while (`health.py` says how long), so a dead node costs one failed call, not one per block;
one that keeps failing is probed by connecting to it anew, and reported to the cluster as long as it is ill. A reach that fails while `auto`
is set is the last choice for `_REACH_COOLDOWN_NS`: the next call takes the next best one, visibly (log, status). Where there is no other
it is taken again, and is its node's failure if it fails again.

Calls share connections, so one that breaks fails many calls. Only the first of them is a failure of the node: whoever says `failed` names
the `link` it used, and one that was given up before is no news.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from kvpool.client.choose import AUTO, check_transport, open_reach
from kvpool.client.health import FAIR_NS, Health, Plane
from kvpool.client.local import LocalReach
from kvpool.client.sources import NodeRef, NodeSource
from kvpool.cluster.config import ClusterConfig
from kvpool.errors import AccessError, ClosedError, DeadlineError, KvpoolError, LimitError, RemoteError, UnavailableError
from kvpool.request.pool import NodeDescription
from kvpool.transport import Reach
from kvpool.units import SECOND
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

log = logging.getLogger(__name__)

_REACH_COOLDOWN_NS = 30 * SECOND
_LOOK_S = 1.0
_PROBE_S = 2.0
_JOIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLink:
    """An open connection: control plane and bytes."""

    node: NodeRef
    rpc: PoolRpc
    reach: Reach


class Links:
    """The open connections of one client. Lives on one event loop."""

    def __init__(self, source: NodeSource, transport: str, security: Security = PLAIN, *, owner: str = "") -> None:
        """`owner`: in whose name sessions with nodes of this host are opened; without one there are none."""
        self._source = source
        self._security = security
        self._owner = owner
        self.locals: tuple[LocalReach, ...] = ()
        """The open reaches to nodes of this host that were joined. Replaced as a whole, so any thread may look."""
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
        self._note_locals()
        await asyncio.gather(*(_discard(task) for task in gone))

    async def care(self) -> None:
        """Probe the nodes that are ill and have rested, and tell the cluster who is ill and who no longer is."""
        live = set(self._source.nodes())
        self.health.keep_only(live)

        async def probe(ref: NodeRef) -> None:
            try:
                await self.link(ref, _PROBE_S)
            except KvpoolError as error:
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
            except KvpoolError as error:
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
        return {ref.node_id: link.reach.name for ref, link in self._ready()}

    def opened(self, ref: NodeRef) -> NodeLink | None:
        """The connection to `ref` if it is open."""
        task = self._open.get(ref)
        ready = task is not None and task.done() and not task.cancelled() and task.exception() is None
        return task.result() if task is not None and ready else None

    async def link(self, ref: NodeRef, timeout_s: float) -> NodeLink:
        """The connection to `ref`, opened if need be. Raises `RemoteError` when that fails or takes longer."""
        if self._closed:
            raise ClosedError("this client was closed")
        task = self._open.get(ref)
        if task is None:
            task = asyncio.create_task(self._connect(ref))
            self._open[ref] = task
            task.add_done_callback(partial(self._forget_failed, ref))
        try:
            async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 loses a cancellation that comes as the task ends
                return await asyncio.shield(task)
        except TimeoutError as error:
            await self.gave_up(ref, timeout_s)
            raise DeadlineError(f"node at {ref.address} took longer than {timeout_s:.2f} s to connect") from error
        except (AccessError, LimitError):
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

    @asynccontextmanager
    async def control(self, link: NodeLink) -> AsyncIterator[PoolRpc]:
        """The control plane of `link`; if that was given up meanwhile, a connection to the same life of its node for this once."""
        if self._holds(link):
            yield link.rpc
            return
        rpc = self._rpc(link.node)
        try:
            yield rpc
        finally:
            await rpc.close()

    async def failed(self, ref: NodeRef, plane: Plane = "control", *, reach: str | None = None, link: NodeLink | None = None) -> None:
        """Give up the connection to `ref`: one of its planes, or only its `reach`, failed. With `link` only if that is the connection."""
        if link is not None and not self._holds(link):
            return
        now_ns = time.monotonic_ns()
        if reach is None or self._transport != AUTO or self._skip_until_ns.get((ref.node_id, reach), 0) > now_ns:
            self.health.failed(ref, plane, now_ns)
        if reach is not None:
            self._skip_until_ns[ref.node_id, reach] = now_ns + _REACH_COOLDOWN_NS
        task = self._open.pop(ref, None)
        if task is not None:
            self._note_locals()
            log.warning("node %s at %s: %s failed; giving the connection up", ref.node_id[:8], ref.address, reach or "it")
            await _discard(task)
        self._forget_the_gone()
        self.look_again()

    async def gave_up(self, ref: NodeRef, after_s: float, link: NodeLink | None = None) -> None:
        """A control call to `ref` was not answered in the time it had: a failure if that was fair, else it just rests."""
        if after_s * SECOND >= FAIR_NS:
            await self.failed(ref, link=link)
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
        self._note_locals()
        await asyncio.gather(*(_discard(task) for task in tasks))
        await self._source.close()

    async def _connect(self, ref: NodeRef) -> NodeLink:
        now_ns = time.monotonic_ns()
        skip = [name for (node_id, name), until in self._skip_until_ns.items() if node_id == ref.node_id and until > now_ns]
        rpc = self._rpc(ref)
        try:
            description = await rpc.describe(2.0)
            opener = partial(open_reach, description, ref.address, self._transport, skip=skip, security=self._security)
            reach = await _opened(partial(_joined, opener, description, self._owner))
        except BaseException:
            await rpc.close()
            raise
        return NodeLink(node=ref, rpc=rpc, reach=reach)

    async def drop_ended(self) -> None:
        """Give up connections whose session has ended: the next call makes them anew, or notices that the node is gone."""
        if all(reach.alive for reach in self.locals):
            return
        for ref, link in self._ready():
            if isinstance(link.reach, LocalReach) and link.reach.board is not None and not link.reach.alive:
                log.warning("node %s at %s: its session has ended; giving the connection up", ref.node_id[:8], ref.address)
                task = self._open.pop(ref)
                self._note_locals()
                self.look_again()
                await _discard(task)

    def _ready(self) -> list[tuple[NodeRef, NodeLink]]:
        """The connections that are open."""
        done = [(ref, task) for ref, task in self._open.items() if task.done() and not task.cancelled() and task.exception() is None]
        return [(ref, task.result()) for ref, task in done]

    def _note_locals(self) -> None:
        reaches = (link.reach for _, link in self._ready())
        self.locals = tuple(reach for reach in reaches if isinstance(reach, LocalReach) and reach.board is not None)

    def _rpc(self, ref: NodeRef) -> PoolRpc:
        return PoolRpc(ref.address, NodeIdentity(ref.node_id, ref.incarnation), self._security)

    def _holds(self, link: NodeLink) -> bool:
        """Whether `link` is the connection to its node."""
        return self.opened(link.node) is link

    def _forget_failed(self, ref: NodeRef, task: "asyncio.Task[NodeLink]") -> None:
        """A connection that could not be opened is tried anew by the next call, whatever the reason was."""
        if (task.cancelled() or task.exception() is not None) and self._open.get(ref) is task:
            del self._open[ref]
        self._note_locals()

    def _forget_the_gone(self) -> None:
        """Bound the books."""
        now_ns = time.monotonic_ns()
        self.health.keep_only(set(self._source.nodes()))
        self._skip_until_ns = {key: until for key, until in self._skip_until_ns.items() if until > now_ns}


def _joined(opener: Callable[[], Reach], node: NodeDescription, owner: str) -> Reach:
    """What `opener` opens; with a session if the node is on this host and offers one."""
    reach = opener()
    if owner and isinstance(reach, LocalReach) and node.shm is not None and node.shm.session:
        reach.join(node.shm, NodeIdentity(node.node_id, node.incarnation), owner, _JOIN_S)
    return reach


async def _opened(opener: Callable[[], Reach]) -> Reach:
    """What `opener` opens in a thread; closed as soon as it is there if nobody waits for it any more."""
    work = asyncio.get_running_loop().run_in_executor(None, opener)

    def close(late: "asyncio.Future[Reach]") -> None:
        if not late.cancelled() and late.exception() is None:
            late.get_loop().run_in_executor(None, late.result().close)

    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(close)
        raise


async def _discard(task: "asyncio.Task[NodeLink]") -> None:
    """Close what `task` opened, or stop it from opening."""
    if not task.done():
        task.cancel()
    try:
        link = await task
    except (RemoteError, asyncio.CancelledError):
        caller = asyncio.current_task()
        if caller is not None and caller.cancelling():
            raise
        return
    await asyncio.to_thread(link.reach.close)
    await link.rpc.close()
