"""The running node: arena, protocol core, data-plane offers, gRPC server, membership. Started and stopped as one."""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

import grpc.aio

from kvpool.clock import Clock, MonotonicClock
from kvpool.cluster import Membership
from kvpool.errors import ConfigError
from kvpool.node.admin import NodeAdmin
from kvpool.node.balancer import BalanceSettings
from kvpool.node.cluster import ClusterSide, NodePlace
from kvpool.node.events import NodeEvents
from kvpool.node.handler import NodeHandler
from kvpool.node.opening import TierConfig, open_tiers
from kvpool.node.resp.server import RespLimits, RespServer
from kvpool.node.resp.store import ValueStore
from kvpool.node.sessions import Announced, Sessions
from kvpool.node.tcp_plane import TcpPlane
from kvpool.node.tenancy import TenantPool, owners_in
from kvpool.node.tiers import Tiers
from kvpool.node.verifier import Verifier
from kvpool.policy.eviction import make_policy
from kvpool.policy.rates import Rates
from kvpool.pool import PoolLimits, PoolState
from kvpool.request.pool import ShmOffer
from kvpool.tier import Arena, reap_stale
from kvpool.tier.arena import DEFAULT_DIRECTORY
from kvpool.tier.board import Board
from kvpool.tier.sockets import socket_path
from kvpool.transport import host_boot_id
from kvpool.transport.ucx import UcxTargetProcess
from kvpool.units import GIB, SECOND, format_size
from kvpool.wire.access_server import add_access
from kvpool.wire.admin_server import add_admin
from kvpool.wire.events_server import add_events
from kvpool.wire.guard import OPEN, Guard
from kvpool.wire.peer_server import add_peer
from kvpool.wire.pool_server import add_pool
from kvpool.wire.session_server import SessionServer

log = logging.getLogger(__name__)

OFFERS = ("shm", "ucx", "tcp", "grpc")
DEFAULT_POLICY = "prefix-lru"
FENCE_NS = 30 * SECOND
"""How long bytes wait whose writer lost its lease: longer than any transfer goes on after its deadline."""
_TICK_S = 0.1
_SETTLES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """How a node is set up. `node_id`: 32 hex digits, stays the same over restarts. `policy`: who is evicted first, by name.

    The arena is a new file in `arena_directory`, or lies on `arena_path`: a file, or a memory device (`/dev/dax…`), such as a CXL one.
    `lock_memory` asks for pages that are never swapped out.

    `offers` None means every way to the bytes that works here; ways that are named must work. `tcp_listen`: where the TCP data plane
    listens, any free port of `listen`'s host if empty. `resp_port`: where clients of Redis are served on that host, 0 for any free port,
    None for nowhere.
    """

    listen: str = "127.0.0.1:0"
    tcp_listen: str = ""
    resp_port: int | None = None
    resp_limits: RespLimits = field(default_factory=RespLimits)
    capacity_bytes: int = GIB
    offers: tuple[str, ...] | None = None
    arena_directory: Path = DEFAULT_DIRECTORY
    arena_path: Path | None = None
    lock_memory: bool = False
    node_id: str | None = None
    policy: str = DEFAULT_POLICY
    limits: PoolLimits = field(default_factory=lambda: PoolLimits(fence_ns=FENCE_NS))
    tiers: TierConfig = field(default_factory=TierConfig)
    guard: Guard = OPEN
    place: NodePlace = field(default_factory=NodePlace)
    balance: BalanceSettings = field(default_factory=BalanceSettings)

    def __post_init__(self) -> None:
        unknown = [name for name in self.offers or () if name not in OFFERS]
        if unknown or self.offers == ():
            raise ConfigError(f"can't offer {', '.join(unknown) or 'nothing'}; choose from {', '.join(OFFERS)}")
        make_policy(self.policy)
        if self.capacity_bytes < 1:
            raise ConfigError("a node needs a capacity above 0; set --capacity")
        if self.place.weight is not None and not (isfinite(self.place.weight) and self.place.weight > 0):
            raise ConfigError("a node's weight is above 0; set --weight")


class PoolNode:
    """One node: `await start()`, then `address` is where it serves; `await stop()` gives everything back.

    A node's incarnation is the time it started, in microseconds: it names one life of its memory, so whatever was
    remembered about an earlier life is recognised as stale. A node with a disk never repeats one, even when the clock was set back.
    """

    def __init__(self, config: NodeConfig, membership: Membership | None = None) -> None:
        self._config = config
        self._membership = membership
        self.node_id = config.node_id or uuid.uuid4().hex
        self.incarnation = time.time_ns() // 1000
        self.address = ""
        self.pool: PoolState | None = None
        """The core, while the node runs."""
        self._server: grpc.aio.Server | None = None
        self.arena: Arena | None = None
        """Its memory, while it runs."""
        self._target: UcxTargetProcess | None = None
        self._plane: TcpPlane | None = None
        self.cluster: ClusterSide | None = None
        """What it does with other nodes, while it is in a cluster."""
        self._ticker: asyncio.Task[None] | None = None
        self._tiers: Tiers | None = None
        self._events: NodeEvents | None = None
        self._board: Board | None = None
        self._sessions: SessionServer | None = None
        self._verifier: Verifier | None = None
        self.door: RespServer | None = None
        """Where clients of Redis come to, if anywhere."""

    async def start(self) -> None:
        """Take the memory, listen, join. Raises `ConfigError` when something can't be had."""
        config = self._config
        wanted = config.offers or OFFERS
        opened = await asyncio.to_thread(open_tiers, config.tiers, self.node_id, self.incarnation)
        self.incarnation = opened.incarnation
        try:
            self.arena = await asyncio.to_thread(self._take_memory)
        except BaseException:
            await asyncio.to_thread(opened.close)
            raise
        clock = MonotonicClock()
        self._events = NodeEvents(self.node_id, self.incarnation, clock)
        capacity, policy = self.arena.capacity, make_policy(config.policy)
        self._board = Board.create(self.node_id, self.incarnation, max_blocks=config.limits.max_blocks, capacity=capacity)
        self.pool = state = PoolState(capacity, policy, config.limits, self._events.arena_changed, Announced(self._board))
        self._tiers = Tiers(state, self.arena, clock, below=opened.below, beside=opened.beside, settings=config.tiers.flow)
        await self._events.start(below=opened.below, beside=opened.beside, pressure=state.pressure)
        self._tiers.start()
        handler = NodeHandler(
            state,
            self.arena,
            clock,
            node_id=self.node_id,
            incarnation=self.incarnation,
            grpc_data="grpc" in wanted,
            tiers=self._tiers,
        )
        sessions = Sessions(handler, state, self._tiers, self._board, clock, capacity)
        self._verifier = sessions.verifier = Verifier(state, self.arena, clock, handler.examine)
        handler.counted_here = sessions.counted
        session = self._serve_sessions(sessions) if {"shm", "tcp"} & set(wanted) else ""
        if "shm" in wanted:
            handler.shm = ShmOffer(path=str(self.arena.path), boot_id=host_boot_id(), session=session)
        if "ucx" in wanted:
            await self._offer_ucx(handler, self.arena)
        if "tcp" in wanted:
            await self._offer_tcp(handler, self.arena, session)
        guard, rates = config.guard, Rates(config.guard.limits)
        admin = NodeAdmin(handler, state, self.arena, self._tiers, clock)
        if guard.book is not None:
            admin.keep_quotas(guard.book)
        self._server = guard.server(rates, clock)
        pool = TenantPool(handler, owners_in(state, self._tiers), clock, rates)
        add_pool(self._server, pool)
        add_admin(self._server, admin)
        add_events(self._server, self._events)
        add_access(self._server, guard)
        if self._membership is not None:
            self.cluster = ClusterSide(
                handler.identity,
                self._membership,
                handler,
                state,
                self.arena,
                self._tiers,
                clock,
                settings=config.balance,
                security=guard.security,
                ask_heads=True,
            )
            admin.balancer = self.cluster.balancer
            add_peer(self._server, self.cluster.balancer)
        await self._open_door(ValueStore(pool, admin, self.arena), rates, clock, handler, sessions)
        self.address = guard.bind(self._server, config.listen)
        await self._server.start()
        self._ticker = asyncio.create_task(_tick(handler, sessions))
        if self.cluster is not None:
            await self.cluster.join(self.address, config.place.info(config.capacity_bytes))
        self._say(wanted, self.arena)

    def _say(self, wanted: Sequence[str], arena: Arena) -> None:
        missing = [name for name, made in (("ucx", self._target), ("tcp", self._plane)) if made is None]
        offers = [name for name in wanted if name not in missing]
        log.info("node %s serves %s at %s over %s", self.node_id, format_size(arena.capacity), self.address, ", ".join(offers))

    def _take_memory(self) -> Arena:
        config = self._config
        make, where = (Arena.create, config.arena_directory) if config.arena_path is None else (Arena.on, config.arena_path)
        return make(where, self.node_id, self.incarnation, config.capacity_bytes, lock=config.lock_memory)

    def _serve_sessions(self, sessions: Sessions) -> str:
        """Let clients on this host in; where they come to. They do without, if the socket can't be made."""
        directory = self._config.arena_directory
        reap_stale(directory)
        server = SessionServer(socket_path(directory, self.node_id, self.incarnation), sessions)
        try:
            server.start()
        except ConfigError as error:
            log.warning("clients on this host get no sessions, so they ask by gRPC: %s", error)
            return ""
        sessions.drop = server.drop
        self._sessions = server
        return str(server.path)

    async def _open_door(self, values: ValueStore, rates: Rates, clock: Clock, handler: NodeHandler, sessions: Sessions) -> None:
        """Let clients of Redis in, if they are to be."""
        config = self._config
        if config.resp_port is None:
            return
        self.door = door = RespServer(values, config.guard, rates, clock, handler.describe, config.resp_limits)
        handler.counted_here = lambda: {**sessions.counted(), **door.counters}
        await door.start(f"{config.listen.rpartition(':')[0]}:{config.resp_port}")
        log.info("node %s lets clients of Redis in at %s", self.node_id, door.address)

    async def _offer_ucx(self, handler: NodeHandler, arena: Arena) -> None:
        """Serve the arena over UCX. Without a usable UCX that is an error only if it was asked for by name."""
        try:
            target = await asyncio.to_thread(UcxTargetProcess, arena.path, arena.superblock.data_offset, arena.capacity)
        except ConfigError as error:
            if self._config.offers is not None:
                raise
            log.warning("not offering UCX, so other hosts will read over gRPC: %s", error)
            return
        self._target = target
        handler.ucx = lambda: target.offer

    async def _offer_tcp(self, handler: NodeHandler, arena: Arena, session: str) -> None:
        """Serve blocks by key and the arena over TCP. That it can't be is an error only if it was asked for by name."""
        config, guard = self._config, self._config.guard
        listen = config.tcp_listen or f"{config.listen.rpartition(':')[0]}:0"
        guard.check_listen(listen)
        tokens = None if guard.tokens is None else guard.tokens.path
        try:
            if not session:
                raise ConfigError("it reads as a client of this host does, and those get no sessions")
            plane = await asyncio.to_thread(TcpPlane, handler.identity, arena.path, session, listen, guard.security, tokens)
        except ConfigError as error:
            if config.offers is not None:
                raise
            log.warning("not offering TCP, so other hosts will read in slower ways: %s", error)
            return
        self._plane = plane
        handler.tcp = lambda: plane.offer

    async def stop(self) -> None:
        """Leave, finish calls in flight (bounded), give the memory back. A second call does nothing."""
        if self.cluster is not None:
            await self.cluster.leave()
            await self.cluster.stop()
        if self._events is not None:
            await self._events.stop()
        if self._server is not None:
            await self._server.stop(grace=1.0)
        if self.door is not None:
            await self.door.stop()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._verifier is not None:
            await self._verifier.close()
        for child in (self._plane, self._target):
            if child is not None:
                await asyncio.to_thread(child.close)
        if self._sessions is not None:
            self._sessions.close()
        if self._tiers is not None:
            await self._tiers.stop()
        if self._board is not None:
            self._board.close()
        if self.arena is not None:
            self.arena.close()
        self.pool = self.cluster = self._events = self._server = self._ticker = self._target = self._tiers = self.arena = None
        self._plane = self._sessions = self._board = self._verifier = self.door = None


async def _tick(handler: NodeHandler, sessions: Sessions) -> None:
    """Let leases and blocks run out on time, and take in what readers used, for as long as the node lives."""
    while True:
        await asyncio.sleep(_TICK_S)
        sessions.tick()
        handler.tick()
        for _ in range(_SETTLES):
            if not sessions.settle():
                break
            await asyncio.sleep(0)
