"""Simulated processes on the node's own host: they read by the board without asking, and write into slabs.

Theory. Such a process maps the arena and the board. It copies a block in steps and then looks whether its record is still the one it
began with; or it holds the block first and needs no second look. Neither checks a checksum. What it asks of the node (slabs, carving, the
end of a hold) arrives at once and in order, as over a socket on one host. It comes to rest with the clients, and its delays and choices
come from random streams of its own.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, count
from random import Random

from kvpool.block import BlockKey
from kvpool.pool import Reserve
from kvpool.testing.sim import frames
from kvpool.testing.sim.client import scribble
from kvpool.testing.sim.loop import Loop
from kvpool.testing.sim.node import Node
from kvpool.testing.sim.world import UNIT, Block, World


class Local:
    """One process. `salts` must be its own among all writers."""

    def __init__(self, index: int, loop: Loop, world: World, node: Node, rng: Random, salts: "count[int]") -> None:
        self.owner = f"l{index}"
        self.draining = False
        self.running = True
        self._loop = loop
        self._world = world
        self._draw = world.local
        self._node = node
        self._random = rng.random
        self._salts = salts
        self._does = [getattr(self, name) for name, weight in self._draw.weights if weight]
        self._odds = list(accumulate(weight for _, weight in self._draw.weights if weight))

    def start(self) -> None:
        """Begin."""
        self._resume(self._work())

    def _resume(self, steps: Iterator[int]) -> None:
        delay_ns = next(steps, None)
        if delay_ns is None:
            self.running = False
        else:
            self._loop.after(delay_ns, self._go_on, steps)

    def _go_on(self, steps: Iterator[int]) -> None:
        self._loop.stale()  # the budget of events is the clients'
        self._resume(steps)

    def _work(self) -> Iterator[int]:
        while not self.draining:
            yield 1 + int(self._random() * 2 * self._draw.think_ns)
            if self._node.up:
                yield from self._does[bisect_right(self._odds, self._random() * self._odds[-1])]()

    def glance(self) -> Iterator[int]:
        """Read the head of a chain by the board; tell what was used."""
        node, loop = self._node, self._loop
        board, arena = node.board, node.arena
        assert board is not None
        used: list[BlockKey] = []
        for block in self._some_blocks():
            record = board.records.get(block.key)
            if record is None or record.expires_ns <= loop.now_ns:
                break
            number = node.hold(block.key) if self._random() < self._draw.hold_chance else 0
            parts: list[bytes] = []
            for start, end in self._slices(record.length):
                yield int(self._random() * 2 * self._draw.step_ns)
                parts.append(bytes(arena.view[record.offset + start : record.offset + end]))
            if not node.up or node.board is not board:
                return
            if number or board.records.get(block.key) is record:
                node.local.glanced(record, b"".join(parts))
                used.append(block.key)
            else:
                node.coverage.hit("board changed under a reader")
            if number:
                node.let_go(number, block.key)
        node.touch(used)

    def slab(self) -> Iterator[int]:
        """Get a slab, write some blocks into it, carve them; perhaps again; perhaps give up or let it run out."""
        draw, random, node = self._draw, self._random, self._node
        arena, identity = node.arena, node.identity
        blocks = self._some_blocks()
        nbytes = sum(-(-block.length // UNIT) * UNIT for block in blocks) + int(random() * 4) * UNIT
        grant = node.slab(self.owner, int(draw.lease_ns * (0.5 + random())), nbytes)
        if grant is None:
            return
        at = grant.offset
        while blocks:
            part, blocks = blocks[: 1 + int(random() * 2)], blocks[2:]
            for block in part:
                frame = frames.make_frame(block.key, block.length, next(self._salts))
                for start, end in self._slices(block.length):
                    yield int(random() * 2 * draw.step_ns)
                    scribble(node, arena, identity, grant.lease_id, at + start, frame[start:end])
                at += -(-block.length // UNIT) * UNIT
            if not node.up or node.identity != identity:
                return
            if random() < draw.abort_chance:
                break
            node.carve(grant.lease_id, [self._item(block) for block in part])
            if len(part) < 2:
                break
        if random() < 0.7:
            node.let_slab_go(grant.lease_id)

    def _some_blocks(self) -> list[Block]:
        chain = self._world.chains[int(self._random() * len(self._world.chains))]
        return [self._world.blocks[i] for i in chain[: 1 + int(self._random() * len(chain))]]

    def _item(self, block: Block) -> Reserve:
        return Reserve(block.key, block.parent, block.depth, block.length, 0, block.sequence, tenant=block.tenant)

    def _slices(self, length: int) -> list[tuple[int, int]]:
        middle = int(self._random() * length)
        return [(0, middle), (middle, length)]
