"""One cluster from its seed to its verdict: a phase with faults, healing, and the proof that everything comes to where it belongs."""

import asyncio
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvpool.block import BlockKey, Framer, chain_keys
from kvpool.client import core, links
from kvpool.cluster.config import ClusterConfig
from kvpool.node import balancer, heat, inventory, near, standing, tiers
from kvpool.policy.placement import NodeState, PlacedNode, write_targets
from kvpool.pool.allocator import aligned
from kvpool.testing.sim.cluster.faults import Faults
from kvpool.testing.sim.cluster.judge import Judge
from kvpool.testing.sim.cluster.marks import CLUSTER_MARKS
from kvpool.testing.sim.cluster.node import Life, open_sim_reach
from kvpool.testing.sim.cluster.store import SimMembership, Store
from kvpool.testing.sim.cluster.vloop import Process, VirtualLoop, current_process, virtual_time
from kvpool.testing.sim.cluster.wire import Network, SimPeerRpc, SimRpc
from kvpool.testing.sim.cluster.worker import Worker
from kvpool.testing.sim.cluster.world import BLOCK_TOKENS, NAMESPACE, ClusterWorld, draw_cluster
from kvpool.testing.sim.judge import Violation
from kvpool.testing.sim.marks import Coverage
from kvpool.testing.sim.run import Verdict
from kvpool.testing.sim.world import stream
from kvpool.units import MS, SECOND

_PATIENCE_NS = 240 * SECOND
"""Virtual time within which a healed world must have come to rest."""
_SHELLS = (balancer, heat, near, tiers)
"""Rooms that log an unexpected exception and go on; here it is a violation."""


class ClusterSimulation:
    """One world, built and ready to run."""

    def __init__(self, world: ClusterWorld, write_line: Callable[[str], None] | None = None) -> None:
        self.world = world
        self.loop = VirtualLoop(stream(world.seed, "threads"), world.thread_ns)
        self.coverage = Coverage(CLUSTER_MARKS)
        root, framer = NAMESPACE.root(), Framer(NAMESPACE)
        self.chains = [chain_keys(root, chain, BLOCK_TOKENS) for chain in world.chains]
        self.names = {key: f"c{c}.{i}" for c, chain in reversed(list(enumerate(self.chains))) for i, key in enumerate(chain)}
        self.judge = Judge(self.loop, self.names, self.coverage, world.audit_every, lossy=world.loss > 0)
        self.network = Network(
            self.loop, stream(world.seed, "network"), self.coverage, delay_ns=world.delay_ns, jitter_ns=world.jitter_ns, loss=world.loss
        )
        self.store = Store(self.loop)
        self.store.config = world.config
        self.capacity_bytes = aligned(framer.frame_bytes(BLOCK_TOKENS)) * world.capacity_blocks
        self.lives: dict[int, Life] = {}
        self.workers: dict[int, Worker] = {}
        self.processes: list[Process] = []
        self._write_line = write_line
        self._workers_made = 0
        self.digest = 0
        """A number that depends on all that has happened, once it is over."""
        self.faults = Faults(self)

    def run(self, events: int) -> None:
        """Both phases; `events` is how many the first one has. Raises `Violation`."""
        with self._simulated():
            try:
                for index in range(len(self.world.ids) - self.world.spare):
                    self.start_node(index)
                for index in range(len(self.world.client_hosts)):
                    self.start_worker(index)
                self.loop.later(SECOND, self._watch)
                self.faults.start()
                self.loop.run(events=events)
                self._check()
                self._heal()
                self._prove()
            finally:
                self._count()
                self.digest = self._sum()
                self._bury()

    def _count(self) -> None:
        """What nodes count themselves."""
        if any(life.side.near.counters["near_fetched"] for life in self.lives.values()):
            self.coverage.hit("near copies fetched")

    def _sum(self) -> int:
        parts: list[Any] = [self.loop.now_ns, self.loop.events, self.judge.delivered, sorted(self.coverage.counts.items())]
        for index, life in sorted(self.lives.items()):
            parts.append((index, life.incarnation, zlib.crc32(life.arena.data.data), sorted(life.pool.counters().items())))
            parts.append(sorted(life.side.counted().items()))
        return zlib.crc32(repr(parts).encode())

    def say(self, who: str, what: str) -> None:
        """Write one line of a transcript."""
        if self._write_line is not None:
            self._write_line(f"{self.loop.now_ns / MS:12.3f} ms  {who:6} {what}")

    # Processes

    def start_node(self, index: int) -> None:
        """A new life of a node, empty."""
        place = self.world.places[index]
        process = self._process(f"n{index}", place.host or f"n{index}")
        process.spawn(self._node_main(index, process))

    async def _node_main(self, index: int, process: Process) -> None:
        world = self.world
        membership = self.join_store(process)
        life = Life(
            self.loop,
            process,
            membership,
            self.network,
            self.judge,
            world.ids[index],
            world.places[index],
            self.capacity_bytes,
            world.policy,
            world.balance,
            world.offer,
        )
        life.side.balancer._rate = world.rate or None
        self.lives[index] = life
        self.say(process.name, f"begins as {life.node_id[:4]}/{life.incarnation % 10**9}")
        await life.start()
        self.say(process.name, f"joined {life.side.balancer.state}")
        if life.side.balancer.state is NodeState.JOINING:
            self.coverage.hit("node joined others")

    def start_worker(self, index: int) -> None:
        """A new life of a client."""
        self._workers_made += 1
        process = self._process(f"c{index}", self.world.client_hosts[index])
        rng = stream(self.world.seed, f"client {index}/{self._workers_made}")
        process.spawn(self._worker_main(index, process, rng))

    async def _worker_main(self, index: int, process: Process, rng: Any) -> None:
        membership = self.join_store(process)
        worker = Worker(self.loop, self.world, process, membership, self.judge, self.coverage, rng, self.chains)
        worker.resting = self.faults.healed
        self.workers[index] = worker
        await worker.start()

    def join_store(self, process: Process) -> SimMembership:
        """A process's membership."""
        membership = SimMembership(process, self.store, self.network, self.world.lease_ms, self.judge.looked)
        self.judge.memberships.append(membership)
        return membership

    def _process(self, name: str, host: str) -> Process:
        process = Process(self.loop, name, host)
        self.processes.append(process)
        return process

    # Rest

    def unrest(self) -> str:
        """What still moves; empty when every node is active, knows all others, and has nothing to do."""
        there = {(life.node_id, life.incarnation) for life in self.lives.values() if life.process.running}
        for life in self.lives.values():
            name = life.process.name
            if not life.process.running:
                return f"{name} is down"
            report = life.side.balancer.report()
            if report.state != NodeState.ACTIVE:
                return f"{name} is {report.state}"
            if {(ref.node_id, ref.incarnation) for ref in life.side.links.nodes()} != there:
                return f"{name} doesn't know who is there"
            if any(ref.placed.state is not NodeState.ACTIVE for ref in life.side.links.nodes()):
                return f"{name} thinks that not all are active"
            if life.side.links.config != self.config:
                return f"{name} doesn't know the config"
            if not report.settled:
                return f"{name} has blocks to push"
        return self.misplaced(exact=False) if self._in_order else ""

    @property
    def _in_order(self) -> bool:
        """Whether every block must come to where it belongs: nothing was evicted, and no damaged copy was dropped."""
        return self.world.roomy and not self.faults.flipped

    def misplaced(self, *, exact: bool) -> str:
        """A block that isn't on all its targets (`exact`: and nowhere else), of those whose extent somebody knows."""
        placed = [PlacedNode(life.node_id, **_domains(life)) for life in self.lives.values()]
        config = self.config
        targets: dict[BlockKey, tuple[str, ...]] = {}
        for life in self.lives.values():
            for key in life.pool.committed_keys():
                link = life.pool.link(key)
                head = life.side.balancer._inventory.head(key, config.extent_tokens)
                if link is None or link[2] or head is None:
                    continue
                if head not in targets:
                    targets[head] = write_targets(head, placed, config.copies)
                holders = {other.node_id for other in self.judge.holders(key)}
                if missing := [target for target in targets[head] if target not in holders]:
                    return f"{self.names[key]} is missing on {missing[0][:4]}"
                if exact and life.node_id not in targets[head]:
                    return f"{self.names[key]} is still on {life.process.name}"
        return ""

    def _watch(self) -> None:
        """Now and then, remember what has come to be on all its targets."""
        if self.world.kind != "wild" and self.loop.now_ns < 1 << 60 and not self.unrest():
            for life in self.lives.values():
                for key in life.pool.committed_keys():
                    if key not in self.judge.steady and len(self.judge.holders(key)) >= min(self.config.copies, len(self.lives)):
                        self.judge.steady[key] = None
        self.loop.later(SECOND, self._watch)

    @property
    def config(self) -> ClusterConfig:
        """The cluster's; the defaults again when the store forgot it and nobody is left who knew it."""
        return self.store.config or ClusterConfig()

    # Phases

    def _heal(self) -> None:
        """No more faults, no new work; drains end, the dead come back, everything comes to where it belongs."""
        self.faults.heal()
        self.say("world", "heals")
        for worker in self.workers.values():
            worker.resting = True
        deadline_ns = self.loop.now_ns + _PATIENCE_NS
        while (unrest := self._unrest()) and self.loop.now_ns < deadline_ns:
            self._pass(SECOND)
        if unrest:
            raise Violation(f"a healed world doesn't come to rest: {unrest}")
        self.coverage.hit("world came to rest")
        self.say("world", "is at rest")

    def _unrest(self) -> str:
        busy = [worker.process.name for worker in self.workers.values() if worker.busy or worker.client is None]
        if busy or len(self.workers) < len(self.world.client_hosts) or self.faults.draining:
            return f"busy: {busy}, draining: {sorted(self.faults.draining)}"
        return self.unrest() or (self.misplaced(exact=True) if self._in_order else "")

    def _prove(self) -> None:
        """What is there can be read, by a client that has done so before."""
        worker = next(worker for worker in self.workers.values() if worker.client is not None)
        left = {number: self._reachable(chain) for number, chain in enumerate(self.chains)}
        expected = dict(left) if self._in_order else {}

        async def read() -> None:
            assert worker.client is not None
            while left:
                for number in list(left):
                    if await worker.get(worker.client, self.chains[number]) >= expected.get(number, 0):
                        del left[number]
                await asyncio.sleep(0.25)

        worker.process.spawn(read())
        deadline_ns = self.loop.now_ns + _PATIENCE_NS  # a client leaves nodes alone that have failed it, for a minute at the longest
        while left and self.loop.now_ns < deadline_ns:
            self._pass(SECOND // 4)
        if left:
            number = min(left)
            raise Violation(f"a world at rest doesn't give {left[number]} blocks of {self.names[self.chains[number][0]]}...")
        self._check()

    def _reachable(self, chain: Sequence[BlockKey]) -> int:
        """How many leading blocks lie where readers look for them."""
        config = self.config
        placed = [PlacedNode(life.node_id, **_domains(life)) for life in self.lives.values()]
        extent = max(1, config.extent_tokens // BLOCK_TOKENS)
        for i, key in enumerate(chain):
            targets = write_targets(chain[i - i % extent], placed, config.copies)
            if not any(life.node_id in targets for life in self.judge.holders(key)):
                return i
        return len(chain)

    def _pass(self, by_ns: int) -> None:
        until_ns = self.loop.now_ns + by_ns
        self.loop.run(until_ns=until_ns)
        self._check()

    def _check(self) -> None:
        if self.loop.trouble:
            raise Violation(self.loop.trouble)
        for life in self.judge.lives:
            life.pool.check()

    # Around it all

    @contextmanager
    def _simulated(self) -> Iterator[None]:
        """Real shells, with simulated wires, reaches and time."""
        patches: list[tuple[Any, str, Any]] = [
            (links, "PoolRpc", self._pool_rpc),
            (
                links,
                "open_reach",
                lambda node, address, transport, *, skip, security: open_sim_reach(self.network, self.judge, node, address, skip),
            ),
            (standing, "PeerRpc", lambda address, node, security: SimPeerRpc(self.network, address, node)),
            (core, "host_boot_id", lambda: current_process().host),
            (inventory, "SLICE", self.world.slice),
        ]
        patches += [(shell.log, "exception", partial(self._swallowed, shell.__name__)) for shell in _SHELLS]
        before = [(target, name, target.__dict__.get(name)) for target, name, _ in patches]
        for target, name, value in patches:
            setattr(target, name, value)
        try:
            with virtual_time(self.loop):
                yield
        finally:
            for target, name, value in before:
                if value is None:
                    delattr(target, name)
                else:
                    setattr(target, name, value)

    def _pool_rpc(self, address: str, node: Any, security: Any) -> SimRpc:
        return SimRpc(self.network, address, node)

    def _swallowed(self, where: str, message: str, *arguments: object) -> None:
        error = sys.exc_info()[1]
        self.judge.fail(f"{where} swallowed {type(error).__name__}: {error}")

    def _bury(self) -> None:
        """End every task of every life, so that nothing runs after the world."""
        trouble = self.loop.trouble
        for process in self.processes:
            process.bury()
        self.loop.finish()
        self.loop.trouble = trouble


def _domains(life: Life) -> dict[str, Any]:
    place = life.side.registration
    assert place is not None
    info = place.member.info
    return {"weight": float(info["weight"]), "host": info["host"], "rack": info["rack"], "zone": info["zone"]}


def run_cluster(seed: int, events: int, nodes: int, write_line: Callable[[str], None] | None = None) -> Verdict:
    """Run one seed's cluster of `nodes`; as `kvpool.testing.sim.run_seed`."""
    world = draw_cluster(seed, nodes)
    if write_line is not None:
        write_line(world.describe())
    simulation = ClusterSimulation(world, write_line)
    violation = ""
    try:
        simulation.run(events)
    except Exception as error:  # a defect may raise anything; it is reported with its seed
        violation = f"{type(error).__name__}: {error}"
        simulation.say("VIOLATION", violation)
    return Verdict(
        seed=seed,
        violation=violation,
        time_ns=simulation.loop.now_ns,
        events=simulation.loop.events,
        delivered=simulation.judge.delivered,
        digest=simulation.digest,
        coverage=simulation.coverage.counts,
    )
