"""One world from its seed to its verdict: a phase with faults, then healing, then proof that everything still works.

Theory. Safety is checked all along. Liveness can only be asked for once the faults are over: then every client must come to an end, every
lease must run out, and the pool must take as many new blocks as it has room for and give each of them back.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvpool.block import BlockKey
from kvpool.testing.sim.client import Client
from kvpool.testing.sim.faults import Faults
from kvpool.testing.sim.judge import Judge, Violation
from kvpool.testing.sim.liveness import fill, read_back
from kvpool.testing.sim.local import Local
from kvpool.testing.sim.loop import Loop
from kvpool.testing.sim.marks import Coverage
from kvpool.testing.sim.network import Network
from kvpool.testing.sim.node import Node, Note
from kvpool.testing.sim.transcript import Transcript
from kvpool.testing.sim.world import World, draw_world, stream
from kvpool.units import MS, SECOND

_PATIENCE_NS = 20 * SECOND
"""Virtual time within which a healed world must have come to rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one seed. `violation` is empty when nothing was wrong."""

    seed: int
    violation: str
    time_ns: int
    events: int
    delivered: int
    digest: int
    coverage: dict[str, int]


class Simulation:
    """One world, built and ready to run."""

    def __init__(self, world: World, write_line: Callable[[str], None] | None = None) -> None:
        self.world = world
        self.loop = Loop()
        self.coverage = Coverage()
        self.names: dict[BlockKey, str] = {block.key: block.name for block in world.blocks}
        note: Note | None = None if write_line is None else Transcript(self.loop, self.names, write_line)
        self.judge = Judge(world.limits, world.capacity_bytes, world.faults.audit_every, self.coverage, self._name)
        self.judge.watch([block.key for block in world.blocks])
        self.network = Network(self.loop, world.network, stream(world.seed, "network"), world.clients.count, self.coverage)
        self.node = Node(self.loop, world, self.judge, self.coverage, self._answer, note)
        self.clients = [
            Client(i, self.loop, world, self.network, self.node, stream(world.seed, f"client {i}"), count(i + 1, world.clients.count))
            for i in range(world.clients.count)
        ]
        self.locals = [
            Local(i, self.loop, world, self.node, stream(world.seed, f"local {i}"), count((1 << 40) + i, world.local.count))
            for i in range(world.local.count)
        ]
        self.faults = Faults(self.loop, world, self.network, self.node, self.clients, note)
        self._note = note

    def run(self, events: int) -> None:
        """Both phases; `events` is how many the first one has. Raises `Violation` or whatever the core raises."""
        for client in self.clients:
            client.start()
        for local in self.locals:
            local.start()
        self.loop.run(events=events)
        self._audit()
        self._heal()
        self._prove()

    def digest(self) -> int:
        """A number that depends on all that has happened."""
        parts = (self.loop.now_ns, self.loop.events, self.node.digest, self.judge.delivered, sorted(self.node.pool.counters().items()))
        return self.node.ground.disk.snapshot_crc(zlib.crc32(self.node.arena.view, zlib.crc32(repr(parts).encode())))

    def _heal(self) -> None:
        """No more faults, no new work; everything under way comes to an end."""
        self.faults.heal()
        self.network.heal()
        self.node.tick_ns = 50 * MS
        for client in self.clients:
            client.draining = True
        for local in self.locals:
            local.draining = True
        deadline_ns = self.loop.now_ns + _PATIENCE_NS
        while any(client.lanes for client in self.clients) or any(local.running for local in self.locals):
            if self.loop.now_ns >= deadline_ns:
                raise Violation(f"clients don't come to an end: {[client.lanes for client in self.clients]} lanes are left")
            self._pass(20 * MS)
        self._pass(self.world.limits.max_lease_ns + self.world.limits.fence_ns + self.world.clients.ttl_ns + 100 * MS)
        for _ in range(50):
            self._audit()
            books = self.node.pool.books()
            if not books.pinned:
                return
            self._pass(20 * MS)  # the node itself is still writing down
        raise Violation(f"everybody has left, and yet: {books}")

    def _prove(self) -> None:
        """The pool can be filled and read back, through the same clients."""
        client = self.clients[0]
        for steps in (fill, read_back):
            client.begin(steps(client, self.names))
            deadline_ns = self.loop.now_ns + _PATIENCE_NS
            while client.lanes:
                if self.loop.now_ns >= deadline_ns:
                    raise Violation(f"a healed pool doesn't answer: {steps.__name__} hangs")
                self._pass(5 * MS)
        self._audit()
        complaint = ""
        for _ in range(4):  # a tier tries a failed disk again now and then
            self._pass(50 * MS)
            complaint = self.node.below.complaint() if self.node.below is not None else ""
            if not complaint:
                return
        raise Violation(f"the disk is well, the tier below is {complaint}")

    def _pass(self, by_ns: int) -> None:
        until_ns = self.loop.now_ns + by_ns
        self.loop.run(events=1 << 62, until_ns=until_ns)
        self.loop.now_ns = max(self.loop.now_ns, until_ns)

    def _audit(self) -> None:
        """Recount everything as of now."""
        if self.node.up:
            self.node.settle()
            self.judge.audit(self.node.pool)

    def _answer(self, client: int, epoch: int, call: int, incarnation: int, answer: Any) -> None:
        self.network.send(client, 1, self.clients[client].answered, epoch, call, incarnation, answer)

    def _name(self, key: BlockKey) -> str:
        return self.names.get(key) or key.hex()[:8]


def run_seed(seed: int, events: int, write_line: Callable[[str], None] | None = None, world: World | None = None) -> Verdict:
    """Run one seed for `events` events and the proof after them. Whatever goes wrong is in the verdict; `write_line` gets a transcript."""
    world = world or draw_world(seed)
    if write_line is not None:
        write_line(world.describe())
    simulation = Simulation(world, write_line)
    violation = ""
    try:
        simulation.run(events)
    except Exception as error:  # a defect may raise anything; it is reported with its seed
        violation = f"{type(error).__name__}: {error}"
        if write_line is not None:
            write_line(f"{simulation.loop.now_ns / MS:12.6f} ms  VIOLATION {violation}")
    return Verdict(
        seed=seed,
        violation=violation,
        time_ns=simulation.loop.now_ns,
        events=simulation.loop.events,
        delivered=simulation.judge.delivered,
        digest=simulation.digest(),
        coverage=simulation.coverage.counts,
    )
