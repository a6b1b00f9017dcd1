"""A simulated node: everything of a production node but its gRPC server and its mapped file, through all its lives.

The pool's core, the handler, the balancer, the pusher, near copies, heat and standing are the real ones, put together by the real
`ClusterSide`. Here are only the arena (an array), the dispatch of calls, and the reach: how others get at the bytes.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from kvpool.clock import MonotonicClock
from kvpool.errors import ClosedError, ConfigError, KvpoolError, LocalError, UnavailableError
from kvpool.node.balancer import BalanceSettings
from kvpool.node.cluster import ClusterSide, NodePlace
from kvpool.node.handler import NodeHandler
from kvpool.node.tiers import Tiers
from kvpool.policy.eviction import make_policy
from kvpool.pool import PoolState
from kvpool.pool.flow import FlowSettings
from kvpool.request.pool import NodeDescription, ShmOffer, UcxOffer
from kvpool.testing.sim.cluster.judge import Judge
from kvpool.testing.sim.cluster.store import SimMembership
from kvpool.testing.sim.cluster.vloop import WALL_START_NS, Process, VirtualLoop, current_process
from kvpool.testing.sim.cluster.wire import Call, Network
from kvpool.tier import Arena
from kvpool.transport import Run
from kvpool.transport.copy import copy_in, copy_out
from kvpool.transport.reach import Bytes, check_deadline, check_runs
from kvpool.units import MS, SECOND, US
from kvpool.wire import fence
from kvpool.wire.credentials import PLAIN

_TICK_S = 0.1
_MAX_PATIENCE_S = 5.0


class SimArena:
    """The bytes of one life."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.data: Bytes = np.zeros(capacity, np.uint8)

    def view(self, offset: int, length: int) -> Bytes:
        """See `Arena.view`."""
        if offset < 0 or length < 0 or offset + length > self.capacity:
            raise ConfigError(f"range {offset}+{length} is outside an arena of {self.capacity} bytes")
        return self.data[offset : offset + length]


class Life:
    """One life of one node, from its start to its end."""

    def __init__(
        self,
        loop: VirtualLoop,
        process: Process,
        membership: SimMembership,
        network: Network,
        judge: Judge,
        node_id: str,
        place: NodePlace,
        capacity_bytes: int,
        policy: str,
        settings: BalanceSettings,
        offer: str,
    ) -> None:
        self.process = process
        self.membership = membership
        self.address = f"{process.name}:7000"
        self.incarnation = (WALL_START_NS + loop.now_ns) // US
        self.drained: bool = False
        self.letting_go = False
        """The balancer drops blocks at this moment."""
        self.tainted: set[int] = set()
        """64-byte units of the arena that a flipped bit or a zombie has touched."""
        self._loop = loop
        self._network = network
        self._judge = judge
        self._place = place
        self._offer = offer
        self.arena = SimArena(capacity_bytes)
        arena, clock = cast(Arena, self.arena), MonotonicClock()
        self.pool = PoolState(capacity_bytes, make_policy(policy), None, lambda blocks: judge.changed(self, blocks))
        self.tiers = Tiers(self.pool, arena, clock, below=None, beside=None, settings=FlowSettings())
        self.handler = NodeHandler(self.pool, arena, clock, node_id=node_id, incarnation=self.incarnation, tiers=self.tiers)
        self.handler.shm = ShmOffer(path=process.name, boot_id=process.host)
        if offer == "ucx":
            self.handler.ucx = lambda: UcxOffer(worker_address=b"", rkey=b"", base_address=0, length=capacity_bytes)
        self.side = ClusterSide(
            self.handler.identity,
            membership,
            self.handler,
            self.pool,
            arena,
            self.tiers,
            clock,
            settings=settings,
            security=PLAIN,
        )
        judge.observe(self)

    @property
    def node_id(self) -> str:
        """Who it is over all lives."""
        return self.handler.identity.node_id

    async def start(self) -> None:
        """Listen and join; tried again while the store can't be reached."""
        self._network.servers[self.process.name] = self
        self._judge.lives.append(self)
        self.process.spawn(self._tick())
        while True:
            try:
                await self.side.join(self.address, self._place.info(self.arena.capacity))
                return
            except UnavailableError:
                await asyncio.sleep(0.5)

    async def stop(self) -> None:
        """Leave, as a node that is told to end."""
        await self.side.leave()
        await self.side.stop()
        self.end()

    def end(self) -> None:
        """The process is no more."""
        if self.process.alive:
            self.process.kill()
            if self._network.servers.get(self.process.name) is self:
                del self._network.servers[self.process.name]
            self._network.reset(self.process)
            self._judge.died(self)

    def serve(self, call: Call) -> None:
        """Take a call, in a task of this process."""
        self.process.spawn(self._serve(call))

    def taint(self, offset: int, length: int) -> None:
        """These bytes may be anything from now on."""
        self.tainted.update(range(offset // 64, -(-(offset + length) // 64)))

    async def _serve(self, call: Call) -> None:
        outcome: Any
        try:
            metadata = call.meant.metadata() if call.meant is not None else ()
            fence.check(metadata, self.handler.identity, needed=call.what not in ("describe", "lookup"))
            self._judge.heard(self, call)
            outcome = await self._answer(call)
        except ClosedError as error:
            outcome = UnavailableError(str(error))
        except (KvpoolError, LocalError) as error:
            outcome = error
        except Exception as error:
            self._judge.fail(f"{self.process.name} failed in {call.what}: {type(error).__name__}: {error}")
            return
        self._judge.answered(self, call, outcome)
        self._network.reply(self.process, call, outcome)

    async def _answer(self, call: Call) -> Any:
        patience_s = max(0.0, min(_MAX_PATIENCE_S, 0.8 * (call.deadline_ns - self._loop.now_ns) / SECOND))
        handler, arguments, options = self.handler, call.arguments, call.options
        if call.what == "acquire":
            return await handler.acquire(*arguments, **options, patience_s=patience_s)
        if call.what == "acquire_stored":
            lease_id, places = await handler.acquire(*arguments, patience_s=patience_s)
            stored = handler.stored(arguments[2])
            return lease_id, [None if place is None else block for place, block in zip(places, stored, strict=True)]
        if call.what == "reserve":
            return await handler.reserve(*arguments, **options, patience_s=patience_s)
        if call.what == "handed_over":
            return self.side.balancer.left_for(*arguments) == 0
        act: Callable[..., Any] = getattr(handler, call.what)
        return act(*arguments)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.handler.tick()


class SimReach:
    """`Reach` from the process that opens it to the arena of one life. Memory that is mapped outlives its node, as a file does."""

    def __init__(self, network: Network, judge: Judge, life: Life, name: str) -> None:
        self.name = name
        self._network = network
        self._judge = judge
        self._life = life
        self._closed = False

    def read(self, runs: Sequence[Run], into: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.read`."""
        check_runs(runs, self._life.arena.capacity, into, writable=True)
        copy_out(self._served(runs, lease_id, deadline_ns, write=False), runs, into, deadline_ns)

    def write(self, runs: Sequence[Run], source: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.write`."""
        check_runs(runs, self._life.arena.capacity, source, writable=False)
        arena = self._served(runs, lease_id, deadline_ns, write=True)
        self._judge.writes(self._life, lease_id, runs)
        copy_in(arena, runs, source, deadline_ns)

    def close(self) -> None:
        """See `Reach.close`."""
        self._closed = True

    def _served(self, runs: Sequence[Run], lease_id: int, deadline_ns: int, *, write: bool) -> Bytes:
        """The arena, if this reach gets there."""
        if self._closed:
            raise ClosedError("this reach is closed; open another one")
        check_deadline(deadline_ns)
        me, life = current_process(), self._life
        if self.name == "shm":
            return life.arena.data
        far = life.process
        cut = not (self._network.passes(me.name, far.name) and self._network.passes(far.name, me.name))
        if not far.alive and not cut:
            raise UnavailableError(f"{far.name} is gone")
        if cut or (self.name == "grpc" and far.frozen):
            self._network.loop.owe_until(deadline_ns)
            check_deadline(deadline_ns)
        self._network.loop.owe_until(self._network.loop.clock_ns() + MS // 4)
        if self.name == "grpc":
            life.handler.tick()
            for run in runs:
                life.handler.window(lease_id, run.offset, run.length, write=write)
        return life.arena.data


def open_sim_reach(network: Network, judge: Judge, node: NodeDescription, address: str, skip: Sequence[str]) -> SimReach:
    """The best reach from the process that asks to the life that `node` describes. Raises `UnavailableError`."""
    life = network.servers.get(address.partition(":")[0])
    if not isinstance(life, Life) or life.handler.identity != (node.node_id, node.incarnation):
        raise UnavailableError(f"{address} is somebody else by now")
    shm = node.shm is not None and node.shm.boot_id == current_process().host
    for name in ("shm", "ucx", "grpc"):
        if name not in skip and {"shm": shm, "ucx": node.ucx is not None, "grpc": node.grpc_data}[name]:
            return SimReach(network, judge, life, name)
    raise UnavailableError(f"no reach to {address}: all failed lately")
