"""What goes wrong beside the network, when: crashes, stops, flipped bits, clocks that jump.

Each kind has its own random stream and, if the world has it at all, comes at random intervals around its mean.
"""

from collections.abc import Callable, Sequence
from random import Random

from kvpool.testing.sim.client import Client
from kvpool.testing.sim.loop import Loop
from kvpool.testing.sim.network import Network
from kvpool.testing.sim.node import Node, Note
from kvpool.testing.sim.world import World, stream
from kvpool.units import SECOND

_POWER = {"sync error": 0.8, "die inside": 0.0}
"""How likely a trouble of the disk ends with the power going, 0.3 where nothing is said."""


class Faults:
    """Injects the faults of one world until `heal`."""

    def __init__(self, loop: Loop, world: World, network: Network, node: Node, clients: Sequence[Client], note: Note | None) -> None:
        self._loop = loop
        self._world = world
        self._network = network
        self._node = node
        self._clients = clients
        self._note = note
        self._healed = False
        draw, net = world.faults, world.network
        for name, mean_ns, happen in (
            ("client_crash", draw.client_crash_ns, self._client_crash),
            ("client_stop", draw.client_stop_ns, self._client_stop),
            ("node_crash", draw.node_crash_ns, self._node_crash),
            ("bit_flip", draw.bit_flip_ns, self._bit_flip),
            ("clock_jump", draw.clock_jump_ns, self._clock_jump),
            ("discard", draw.discard_ns, self._discard),
            ("disk", world.below.trouble_ns if world.below.kind == "ssd" and world.below.troubles else 0, self._disk),
            ("clog", net.clog_ns * 4, self._clog),
            ("split", net.split_ns * 4, self._split),
        ):
            if mean_ns:
                self._again(stream(world.seed, name), mean_ns, happen)

    def heal(self) -> None:
        """No more faults; a dead node comes back, a stopped client goes on."""
        self._healed = True
        self._node.ground.heal()
        self._node.revive()
        for client in self._clients:
            client.stopped_until_ns = 0

    def _again(self, rng: Random, mean_ns: int, happen: Callable[[Random], None]) -> None:
        self._loop.after(int(rng.expovariate(1) * mean_ns) + 1, self._strike, rng, mean_ns, happen)

    def _strike(self, rng: Random, mean_ns: int, happen: Callable[[Random], None]) -> None:
        if self._healed:
            self._loop.stale()
            return
        happen(rng)
        self._again(rng, mean_ns, happen)

    def _say(self, what: str, *arguments: object) -> None:
        if self._note is not None:
            self._note("fault", what, arguments, "")

    def _client_crash(self, rng: Random) -> None:
        client = rng.choice(self._clients)
        if client.writing:
            self._node.coverage.hit("writer crashed with a reservation")
        self._say("client crash", f"c{client.index}")
        client.crash()
        self._loop.after(int(rng.random() * self._world.faults.stop_for_ns), self._client_start, client, client.epoch)

    def _client_start(self, client: Client, epoch: int) -> None:
        if epoch == client.epoch:
            client.start()

    def _client_stop(self, rng: Random) -> None:
        client = rng.choice(self._clients)
        for_ns = int(rng.random() * 2 * self._world.faults.stop_for_ns)
        client.stopped_until_ns = self._loop.now_ns + for_ns
        self._say("client stop", f"c{client.index}", for_ns)

    def _node_crash(self, rng: Random) -> None:
        if self._node.up:
            self._node.crash(power=rng.random() < 0.5)
            self._loop.after(int(rng.random() * 2 * self._world.faults.node_down_ns), self._node.revive)

    def _bit_flip(self, rng: Random) -> None:
        offset, bit = rng.randrange(self._world.capacity_bytes), rng.randrange(8)
        self._node.arena.view[offset] ^= 1 << bit
        self._node.judge.taint(offset, 1)
        self._say("bit flip", offset, bit)

    def _clock_jump(self, rng: Random) -> None:
        by_ns = rng.choice((-3600, -30, -1, 1, 30, 3600)) * SECOND
        self._node.wall_offset_ns += by_ns
        if by_ns < 0:
            self._node.coverage.hit("clock of the wall jumped back")
        self._say("clock jump", by_ns)

    def _discard(self, rng: Random) -> None:
        """An operator throws a block away."""
        block = rng.choice(self._world.blocks)
        node = self._node
        if node.up:
            now_ns = node.settle()
            node.drop(block.key)
            if node.up:
                node.judge.after(node.pool, now_ns)
            self._say("discard", block.name)

    def _disk(self, rng: Random) -> None:
        name = rng.choice(self._world.below.troubles)
        self._node.ground.trouble(name, rng)
        self._loop.after(int(rng.random() * self._world.below.trouble_ns), self._disk_is_well, rng.random() < _POWER.get(name, 0.3))
        self._say("disk", name)

    def _disk_is_well(self, power: bool) -> None:
        """A trouble is over; some end with the power going."""
        self._node.ground.heal()
        if power and self._node.up and not self._healed:
            self._node.crash(power=True)
            self._loop.after(self._world.faults.node_down_ns, self._node.revive)

    def _clog(self, rng: Random) -> None:
        client, back = rng.choice(self._clients), rng.randrange(2)
        self._network.clog(client.index, back, self._loop.now_ns + int(rng.random() * 2 * self._world.network.clog_ns))
        self._say("clog", f"c{client.index}", "to client" if back else "to node")

    def _split(self, rng: Random) -> None:
        client, back = rng.choice(self._clients), rng.randrange(2)
        self._network.split(client.index, back, self._loop.now_ns + int(rng.random() * 2 * self._world.network.split_ns))
        self._say("split", f"c{client.index}", "to client" if back else "to node")
