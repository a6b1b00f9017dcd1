"""Simulated clients: what they do, how they wait, and how they die.

Theory. A client runs a few *lanes*; each is a generator that yields a delay in ns, or a call whose answer it is sent: None when none came
in time, the node was another life, or it refused. A call says which life of the node it means: the one its operation began with. Bytes
move in steps, each at its own moment, straight into or out of the arena that the client has mapped, or over the control connection. So
leases run out, blocks are evicted and bytes are reused between two steps.

A stopped client (SIGSTOP) does nothing until it goes on, then does at once whatever has come up meanwhile, with leases that ended long ago.
A crashed one never says so: what it held runs out. Its next life has another name and remembers nothing.
"""

from bisect import bisect_right
from collections.abc import Generator
from itertools import accumulate, count
from random import Random
from typing import Any

from kvpool.block import BlockKey
from kvpool.pool import Granted, Reserve
from kvpool.testing.sim import frames
from kvpool.testing.sim.loop import Loop
from kvpool.testing.sim.network import Network
from kvpool.testing.sim.node import REFUSED, Arena, Node
from kvpool.testing.sim.world import Block, World
from kvpool.units import MS
from kvpool.wire.fence import NodeIdentity

Steps = Generator[Any, Any, None]
"""Yields delays in ns and calls (method, arguments, meant life); is sent each call's answer."""

SLICES = 3
"""A block is moved in at most this many steps."""

PIN_NS = 20 * MS
"""Pins last at most this long."""

TRIES = 2
"""How often a commit is said again when no answer comes."""


class Client:
    """One client process through all its lives."""

    def __init__(self, index: int, loop: Loop, world: World, network: Network, node: Node, rng: Random, salts: "count[int]") -> None:
        self.index = index
        self.loop = loop
        self.world = world
        self.draw = world.clients
        self.network = network
        self.node = node
        self.rng = rng
        self.random = rng.random
        self.salts = salts
        self.epoch = 0
        self.owner = f"c{index}.0"
        self.stopped_until_ns = 0
        self.draining = False
        self.lanes = 0
        self.writing = 0
        self.identity: NodeIdentity | None = None
        self.meant: tuple[tuple[str, str], ...] | None = None
        self.arena: Arena | None = None
        self.careless = self.random() < self.draw.careless
        self.streaming = self.random() < self.draw.streaming
        self._calls = 0
        self._pending: dict[int, Generator[Any, Any, None]] = {}
        self._does = [getattr(self, name) for name, weight in self.draw.weights if weight]
        self._odds = list(accumulate(weight for _, weight in self.draw.weights if weight))

    # Life

    def start(self) -> None:
        """Begin all lanes."""
        for _ in range(self.draw.lanes):
            self.begin(self._lane())

    def begin(self, steps: Steps) -> None:
        """Run `steps` as a lane of this life."""
        self.lanes += 1
        self.loop.after(int(self.random() * self.draw.think_ns), self._resume, self.epoch, steps, None)

    def crash(self) -> None:
        """The process is gone, its leases aren't."""
        self.epoch += 1
        self.owner = f"c{self.index}.{self.epoch}"
        self._pending.clear()
        self.lanes = 0
        self.writing = 0
        self.forget_node()

    def answered(self, epoch: int, call: int, incarnation: int, answer: Any) -> None:
        """An answer arrives. Of two, the first counts; those of another life of client or node don't."""
        if epoch != self.epoch:
            self.loop.stale()
            return
        if self.loop.now_ns < self.stopped_until_ns:
            self.loop.at(self.stopped_until_ns, self.answered, epoch, call, incarnation, answer)
            self.loop.stale()
            return
        steps = self._pending.pop(call, None)
        if steps is None:
            self.loop.stale()
            return
        if answer is REFUSED:
            self.forget_node()
            answer = None
        elif self.identity is not None and incarnation != self.identity.incarnation:
            self.node.coverage.hit("completion after restart dropped")
            answer = None
        self._resume(epoch, steps, answer)

    def _resume(self, epoch: int, steps: Steps, value: Any) -> None:
        loop = self.loop
        if epoch != self.epoch:
            loop.stale()
            return
        if loop.now_ns < self.stopped_until_ns:
            loop.at(self.stopped_until_ns, self._resume, epoch, steps, value)
            loop.stale()
            return
        try:
            wanted = steps.send(value)
        except StopIteration:
            self.lanes -= 1
            return
        if type(wanted) is int:
            loop.after(wanted, self._resume, epoch, steps, None)
            return
        self._calls += 1
        call = self._calls
        self._pending[call] = steps
        method, arguments, meant = wanted
        self.network.send(self.index, 0, self.node.receive, self.index, epoch, call, meant, method, arguments)
        loop.after(self.draw.timeout_ns, self._give_up, epoch, call)

    def _give_up(self, epoch: int, call: int) -> None:
        self.loop.stale()
        if epoch != self.epoch or call not in self._pending:
            return
        if self.loop.now_ns < self.stopped_until_ns:
            self.loop.at(self.stopped_until_ns, self._give_up, epoch, call)
            return
        self.loop.events += 1
        self._resume(epoch, self._pending.pop(call), None)

    def forget_node(self) -> None:
        """Whoever was there is another now: ask again."""
        self.identity = self.meant = self.arena = None

    # What it does

    def _lane(self) -> Steps:
        while not self.draining:
            yield int(self.random() * 2 * self.draw.think_ns)
            if self.identity is None:
                yield from self.connect()
            else:
                yield from self._does[bisect_right(self._odds, self.random() * self._odds[-1])]()

    def connect(self) -> Steps:
        """Ask who is there, and map its memory."""
        answer = yield "describe", (), None
        if answer is not None:
            self.identity, self.arena = answer
            self.meant = self.identity.metadata()

    def probe(self) -> Steps:
        """Look up some blocks."""
        yield "lookup", ([block.key for block in self._some_blocks()],), self.meant

    def pin(self) -> Steps:
        """Ask for some blocks to be kept, softly or hard."""
        duration_ns = 1 + int(self.random() * PIN_NS)
        keys = [block.key for block in self._some_blocks()]
        yield "pin", (self.owner, duration_ns, self.random() < 0.5, keys), self.meant

    def unpin(self) -> Steps:
        """Let them go again."""
        yield "unpin", (self.owner, [block.key for block in self._some_blocks()]), self.meant

    def quota(self) -> Steps:
        """As an operator: limit a tenant, or lift its limit."""
        tenant = self.world.tenants[int(self.random() * len(self.world.tenants))]
        limit = self.world.quota_bytes if self.random() < 0.8 else -1
        yield "quota", (tenant, limit), self.meant

    def put(self) -> Steps:
        """Reserve, write, commit a piece of a chain; perhaps give up, dawdle, or say it twice."""
        draw, random = self.draw, self.random
        blocks = self._some_blocks()
        ttl_ns = draw.ttl_ns if draw.ttl_chance and random() < draw.ttl_chance else 0
        items = [self._item(block, ttl_ns) for block in blocks]
        lease_ns = int(draw.lease_ns * (0.5 + random()))
        identity, arena = self.identity, self.arena
        started_ns = self.loop.now_ns
        answer = yield "reserve", (self.owner, lease_ns, items), self.meant
        if answer is None or not answer.lease_id or identity is None or arena is None:
            return
        lease_id, meant = answer.lease_id, identity.metadata()
        granted = [(block, grant.offset) for block, grant in zip(blocks, answer.grants, strict=True) if isinstance(grant, Granted)]
        self.writing += 1
        whole = yield from self._write_all(granted, lease_id, started_ns + self._cut(lease_ns), identity, arena)
        self.writing -= 1
        if not whole or (draw.abort_chance and random() < draw.abort_chance):
            yield "release", (lease_id, ()), meant
            return
        if draw.linger_chance and random() < draw.linger_chance:
            yield lease_ns
        keys = [block.key for block, _ in granted]
        if draw.repeat_chance and random() < draw.repeat_chance:
            for _ in range(2):
                yield "commit", (lease_id, keys[:1]), meant
        done = yield "commit", (lease_id, keys), meant
        for _ in range(TRIES):
            if done is None or (draw.repeat_chance and random() < draw.repeat_chance):
                done = yield "commit", (lease_id, keys[: 1 + int(random() * len(keys))]), meant
        if done is None or not all(done):
            yield "release", (lease_id, ()), meant

    def _write_all(
        self, granted: list[tuple[Block, int]], lease_id: int, deadline_ns: int, identity: NodeIdentity, arena: Arena
    ) -> Generator[Any, Any, bool]:
        """Write frames in steps; False when it was given up."""
        draw, random, meant = self.draw, self.random, identity.metadata()
        for block, offset in granted:
            frame = frames.make_frame(block.key, block.length, next(self.salts))
            for start, end in self._slices(block.length):
                yield int(random() * 2 * draw.step_ns)
                if not self.careless and self.loop.now_ns >= deadline_ns:
                    return False
                if self.streaming:
                    done = yield "write", (lease_id, offset + start, frame[start:end]), meant
                    if not done:
                        return False
                else:
                    scribble(self.node, arena, identity, lease_id, offset + start, frame[start:end])
            if draw.renew_chance and random() < draw.renew_chance:
                at_ns = self.loop.now_ns
                if (yield "renew", (lease_id, draw.lease_ns), meant):
                    deadline_ns = max(deadline_ns, at_ns + self._cut(draw.lease_ns))
        return True

    def get(self) -> Steps:
        """Acquire the head of a chain, copy it in steps, take what validates, release with what doesn't."""
        draw, random = self.draw, self.random
        chain = self.world.chains[int(random() * len(self.world.chains))]
        blocks = [self.world.blocks[i] for i in chain[: 1 + int(random() * len(chain))]]
        lease_ns = int(draw.lease_ns * (0.5 + random()))
        identity, arena = self.identity, self.arena
        deadline_ns = self.loop.now_ns + self._cut(lease_ns)
        answer = yield "acquire", (self.owner, lease_ns, [block.key for block in blocks]), self.meant
        if answer is None or not answer.lease_id or identity is None or arena is None:
            return
        if draw.linger_chance and random() < draw.linger_chance:
            yield 2 * lease_ns
        suspects: list[BlockKey] = []
        meant = identity.metadata()
        for block, at in zip(blocks, answer.found, strict=True):
            if at is None:
                break
            frame = yield from self._copy(arena, answer.lease_id, at.offset, at.length, meant)
            if frame is None or (not self.careless and self.loop.now_ns >= deadline_ns):
                break
            if not self._take(block, frame, answer.lease_id, identity):
                suspects.append(block.key)
                break
            if draw.wrong_suspect_chance and random() < draw.wrong_suspect_chance:
                suspects.append(block.key)
            if draw.renew_chance and random() < draw.renew_chance:
                at_ns = self.loop.now_ns
                if (yield "renew", (answer.lease_id, draw.lease_ns), meant):
                    deadline_ns = max(deadline_ns, at_ns + self._cut(draw.lease_ns))
        yield "release", (answer.lease_id, tuple(suspects)), meant

    def _copy(
        self, arena: Arena, lease_id: int, offset: int, length: int, meant: tuple[tuple[str, str], ...]
    ) -> Generator[Any, Any, bytes | None]:
        parts: list[bytes] = []
        for start, end in self._slices(length):
            yield int(self.random() * 2 * self.draw.step_ns)
            if self.streaming:
                part = yield "read", (lease_id, offset + start, end - start), meant
                if not part:
                    return None
            else:
                part = bytes(arena.view[offset + start : offset + end])
            parts.append(part)
        return b"".join(parts)

    def _take(self, block: Block, frame: bytes, lease_id: int, identity: NodeIdentity) -> bool:
        """Validate as every reader must; only what passes is handed on."""
        node = self.node
        leased = identity == node.identity and lease_id in node.judge.truth.leases
        if not leased:
            node.coverage.hit("read outlived its lease")
        if len(frame) != block.length or not frames.opens(frame, block.key):
            node.coverage.hit("damaged frame refused by a reader")
            if leased:
                node.judge.refused(lease_id, block.key)
            return False
        node.judge.delivers(block.key, block.length, frame)
        return True

    # Choices

    def _some_blocks(self) -> list[Block]:
        """A run of one chain, as long as a batch at most."""
        chain = self.world.chains[int(self.random() * len(self.world.chains))]
        first = int(self.random() * len(chain)) if self.random() < 0.5 else 0
        return [self.world.blocks[i] for i in chain[first : first + self.draw.batch]]

    def _cut(self, lease_ns: int) -> int:
        """What the node makes of a lease that long."""
        return min(lease_ns, self.world.limits.max_lease_ns)

    def _item(self, block: Block, ttl_ns: int) -> Reserve:
        priority = 50 if self.random() < 0.8 else int(self.random() * 101)
        return Reserve(block.key, block.parent, block.depth, block.length, ttl_ns, block.sequence, priority, self.draw.ttl_ns, block.tenant)

    def _slices(self, length: int) -> list[tuple[int, int]]:
        pieces = 1 + int(self.random() * SLICES)
        cuts = [length * i // pieces for i in range(pieces + 1)]
        return [(cuts[i], cuts[i + 1]) for i in range(pieces)]


def scribble(node: Node, arena: Arena, identity: NodeIdentity, lease_id: int, offset: int, data: bytes) -> None:
    """Write into mapped memory, whatever has become of the lease."""
    if identity == node.identity and lease_id not in node.judge.truth.leases:
        node.coverage.hit("writer stopped and came back a zombie")
        if node.judge.is_fenced(offset):
            node.coverage.hit("fence kept a zombie from others")
        elif node.judge.taint(offset, len(data)):
            node.coverage.hit("zombie scribbled over reused bytes")
    arena.view[offset : offset + len(data)] = data
