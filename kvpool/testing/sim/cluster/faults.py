"""What happens to a cluster, when: in worlds that are careful one thing at a time, in others at random intervals."""

from typing import TYPE_CHECKING

from kvpool.client.leasing import BASE_MS
from kvpool.node.balancer import Balancer
from kvpool.policy.placement import NodeState
from kvpool.testing.sim.cluster.node import Life
from kvpool.testing.sim.cluster.vloop import Process
from kvpool.testing.sim.cluster.wire import STORE
from kvpool.testing.sim.world import stream
from kvpool.units import MS, SECOND

if TYPE_CHECKING:
    from kvpool.testing.sim.cluster.run import ClusterSimulation

_LOOK_NS = SECOND // 2
_STUCK_NS = 300 * SECOND


class Faults:
    """Injects what a world has, until `heal`."""

    def __init__(self, simulation: "ClusterSimulation") -> None:
        self.healed = False
        self.flipped = 0
        self.draining: dict[int, None] = {}
        """Nodes that an operator drains."""
        self._sim = simulation
        self._world = simulation.world
        self._rng = stream(simulation.world.seed, "faults")
        self._hit = simulation.coverage.hit
        self._acts = {
            "join": self._join,
            "drain": self._drain,
            "cancel drain": self._cancel_drain,
            "store down": self._store_down,
            "store emptied": self._store_emptied,
            "config": self._config,
            "kill": self._kill,
            "power": self._power,
            "freeze": self._freeze,
            "alone": self._alone,
            "storeless": self._storeless,
            "cut": self._cut,
            "flip": self._flip,
            "client freeze": self._client_freeze,
            "client crash": self._client_crash,
            "client cut": self._client_cut,
        }
        self._under_way = 0
        self._trap = False
        """The next who is about to write is frozen."""
        simulation.judge.granted = self._granted
        self._stuck_since_ns = 0

    def start(self) -> None:
        """Begin, once the first nodes have had time to join."""
        self._sim.loop.later(3 * SECOND, self._strike)

    def heal(self) -> None:
        """No more faults: cables are whole, the store answers, the frozen go on, the dead come back, drains are let end."""
        self.healed = True
        sim = self._sim
        sim.network.heal()
        sim.store.start()
        for process in sim.processes:
            if process.frozen and process.alive:
                process.thaw()
        for index, life in list(sim.lives.items()):
            if not life.process.alive:
                self._revive(index, life)
        for index, worker in list(sim.workers.items()):
            if not worker.process.alive:
                sim.start_worker(index)
        if self.draining:
            self._hit("drain under way when faults end")

    # When

    def _strike(self) -> None:
        if self.healed:
            return
        sim, world = self._sim, self._world
        if world.kind == "careful":
            if self._under_way or sim.unrest():
                if sim.loop.now_ns - self._stuck_since_ns > _STUCK_NS:
                    sim.judge.fail(f"after one fault the world doesn't come to rest: {sim.unrest()}")
                sim.loop.later(_LOOK_NS, self._strike)
                return
            for life in sim.lives.values():  # all is at rest: what is here counts from now on
                for key in life.pool.committed_keys():
                    if len(sim.judge.holders(key)) >= sim.config.copies:
                        sim.judge.steady[key] = None
        self._stuck_since_ns = sim.loop.now_ns
        self._acts[self._rng.choice(world.faults)]()
        sim.loop.later(int(self._rng.expovariate(1) * world.fault_ns) + 1, self._strike)

    def _for_ns(self) -> int:
        """How long a fault lasts."""
        return int(self._rng.expovariate(1) * self._world.for_ns) + 1

    def _ending(self, after_ns: int, end: object, *arguments: object) -> None:
        """A fault is under way, and over in `after_ns`."""
        self._under_way += 1

        def over() -> None:
            self._under_way -= 1
            if not self.healed:
                end(*arguments)  # type: ignore[operator]

        self._sim.loop.later(after_ns, over)

    def _say(self, what: str) -> None:
        self._sim.say("fault", what)

    def _some(self, *, active: bool = False) -> tuple[int, Life] | None:
        """A node that runs, if any; `active`: one that is in the cluster and not about to leave it."""
        lives = [
            (index, life)
            for index, life in self._sim.lives.items()
            if life.process.running and not (active and (life.side.balancer.state is not NodeState.ACTIVE or index in self.draining))
        ]
        return self._rng.choice(lives) if lives else None

    # Nodes come and go in good order

    def _join(self) -> None:
        absent = [index for index in range(len(self._world.ids)) if index not in self._sim.lives]
        if self._world.kind == "calm" and self._sim.store.forgetful_ns + 3 * self._world.lease_ms * MS > self._sim.loop.now_ns:
            return  # a node that starts while the store knows nobody takes itself for the first one
        if absent:
            self._say(f"n{absent[0]} is started")
            self._sim.start_node(absent[0])

    def _drain(self) -> None:
        active = [index for index, life in self._sim.lives.items() if life.side.balancer.state is NodeState.ACTIVE]
        chosen = self._some(active=True)
        if chosen is None or len(active) - len(self.draining) < 2:
            return
        index, life = chosen
        self._say(f"drain n{index}")
        self.draining[index] = None
        life.process.spawn(self._order(life, cancel=False))
        self._sim.loop.later(_LOOK_NS, self._drained, index, life)

    async def _order(self, life: Life, *, cancel: bool) -> None:
        life.side.balancer.drain(cancel=cancel, bytes_per_s=self._world.rate)

    def _drained(self, index: int, life: Life) -> None:
        """The operator looks whether the drain has ended, and then stops the node."""
        sim = self._sim
        if sim.lives.get(index) is not life or not life.process.alive or index not in self.draining:
            return
        balancer: Balancer = life.side.balancer
        report = balancer.report() if life.process.running else None
        if report is None or report.state != NodeState.DRAINING or not report.settled:
            sim.loop.later(_LOOK_NS, self._drained, index, life)
            return
        self._hit("drain ended")
        self._say(f"n{index} is drained")
        if self._world.roomy:
            sim.judge.may_stop(life)
        life.process.spawn(self._stopped(index, life))

    async def _stopped(self, index: int, life: Life) -> None:
        await life.side.leave()
        sim = self._sim
        sim.loop.later(SECOND, self._gone, index, life)
        await life.side.stop()

    def _gone(self, index: int, life: Life) -> None:
        """The process has had time to say goodbye."""
        life.end()
        self.draining.pop(index, None)
        if self._sim.lives.get(index) is life:
            del self._sim.lives[index]

    def _cancel_drain(self) -> None:
        lives = [self._sim.lives[index] for index in self.draining if index in self._sim.lives]
        under_way = [life for life in lives if life.process.running and life.side.balancer.state is NodeState.DRAINING]
        if under_way and not under_way[0].side.balancer.report().settled:
            life = under_way[0]
            self._say(f"cancel the drain of {life.process.name}")
            self._hit("drain cancelled")
            self.draining.pop(int(life.process.name[1:]))
            life.process.spawn(self._order(life, cancel=True))

    # The store

    def _store_down(self) -> None:
        if self._sim.store.up:
            self._say("the store is down")
            self._hit("store down")
            self._sim.store.stop()
            self._ending(self._for_ns(), self._sim.store.start)

    def _store_emptied(self) -> None:
        self._say("the store is emptied")
        self._hit("store emptied")
        self._sim.store.stop()
        self._sim.store.empty()
        self._ending(self._for_ns() // 4, self._sim.store.start)

    def _config(self) -> None:
        chosen = self._some()
        if chosen is None:
            return
        rng, wild = self._rng, self._world.kind == "wild"
        name, value = rng.choice((("copies", str(rng.randint(1, 3))), ("near_copies", rng.choice(("true", "false")))))
        if wild and rng.random() < 0.3:
            name, value = "extent_tokens", str(16 * rng.choice((1, 2, 4, 8)))
        self._say(f"config set {name} {value}")
        self._hit("config changed")
        chosen[1].process.spawn(self._configure(chosen[1], name, value))

    async def _configure(self, life: Life, name: str, value: str) -> None:
        if life.membership.connected and self._sim.store.up:
            life.membership.configure_soon(lambda config: config.with_setting(name, value))

    # Nodes die and are cut off

    def _kill(self) -> None:
        self._die(dark=False)

    def _power(self) -> None:
        self._die(dark=True)

    def _die(self, *, dark: bool) -> None:
        chosen = self._some()
        if chosen is None:
            return
        index, life = chosen
        self._say(f"n{index} {'loses power' if dark else 'is killed'}")
        self._hit("node lost power" if dark else "node killed")
        if dark:
            self._sim.network.dark.add(life.process.name)
        life.end()
        self._ending(self._for_ns() + SECOND // 10, self._revive, index, life)

    def _revive(self, index: int, life: Life) -> None:
        """The next life of a node."""
        self._sim.network.dark.discard(life.process.name)
        if self._sim.lives.get(index) is life and not life.process.alive:
            self.draining.pop(index, None)
            del self._sim.lives[index]
            self._hit("node restarted under a new incarnation")
            self._sim.start_node(index)

    def _freeze(self) -> None:
        chosen = self._some()
        if chosen is None:
            return
        self._stop(chosen[1].process)

    def _stop(self, process: Process, for_ns: int = 0) -> None:
        if self.healed or not process.running:
            return
        for_ns = for_ns or self._for_ns()
        self._say(f"{process.name} is frozen for {for_ns / SECOND:.2f} s")
        if process.name.startswith("n") and for_ns > self._world.lease_ms * MS:
            self._hit("node frozen beyond its lease")
        process.freeze()
        self._ending(for_ns, process.thaw)

    def _granted(self, process: Process) -> None:
        """Somebody is about to write: the hardest moment to be stopped in."""
        if self._trap:
            self._trap = False
            world = self._world
            in_ns = world.delay_ns + int(self._rng.random() * (world.jitter_ns + world.thread_ns))
            for_ns = BASE_MS * MS + int(self._rng.random() * SECOND)  # a bit longer than the lease
            self._sim.loop.later(in_ns, self._stop, process, for_ns)

    def _names(self) -> list[str]:
        return [life.process.name for life in self._sim.lives.values()]

    def _alone(self) -> None:
        """A node that no other node or client reaches, though it beats."""
        chosen = self._some()
        if chosen is None:
            return
        me, until_ns = chosen[1].process.name, self._sim.loop.now_ns + self._for_ns() + int(self._rng.random() * 12 * SECOND)
        others = [name for name in (*self._names(), *(worker.process.name for worker in self._sim.workers.values())) if name != me]
        one_way = self._rng.random() < 0.3
        self._say(f"{me} is cut off from all others{' one way' if one_way else ''}")
        self._hit("node cut off from all others")
        for name in others:
            self._sim.network.cut(name, me, until_ns)
            if not one_way:
                self._sim.network.cut(me, name, until_ns)
        self._ending(until_ns - self._sim.loop.now_ns, _nothing)

    def _storeless(self) -> None:
        """A node that all others reach, and the store doesn't."""
        chosen = self._some()
        if chosen is None:
            return
        process, until_ns = chosen[1].process, self._sim.loop.now_ns + self._for_ns()
        self._say(f"{process.name} is cut off from the store")
        self._hit("node cut off from the store")
        process.troubled_ns = max(process.troubled_ns, until_ns)
        way = self._rng.randrange(3)
        if way != 1:
            self._sim.network.cut(process.name, STORE, until_ns)
        if way != 2:
            self._sim.network.cut(STORE, process.name, until_ns)
        self._ending(until_ns - self._sim.loop.now_ns, _nothing)

    def _cut(self) -> None:
        """One link in one direction."""
        names = self._names() + [worker.process.name for worker in self._sim.workers.values()]
        if len(names) < 2:
            return
        source, target = self._rng.sample(names, 2)
        until_ns = self._sim.loop.now_ns + self._for_ns()
        self._say(f"what {source} sends to {target} is lost")
        self._hit("cut in one direction")
        self._sim.network.cut(source, target, until_ns)
        self._ending(until_ns - self._sim.loop.now_ns, _nothing)

    def _flip(self) -> None:
        """One bit in some of the blocks of a node."""
        chosen = self._some()
        keys = chosen[1].pool.committed_keys() if chosen is not None else []
        if chosen is None or not keys:
            return
        life, share = chosen[1], self._rng.random()
        for key in [key for key in keys if self._rng.random() < share]:
            place = life.pool.locate(key)
            assert place is not None
            at = place.offset + self._rng.randrange(place.length)
            life.arena.data[at] ^= 1 << self._rng.randrange(8)
            life.taint(at, 1)
            self.flipped += 1
            self._say(f"a bit of {self._sim.names[key]} flips on {life.process.name}")
            self._hit("bits flipped")

    # Clients

    def _client_freeze(self) -> None:
        worker = self._rng.choice(list(self._sim.workers.values()))
        self._hit("client frozen")
        self._trap = self._rng.random() < 0.7
        if not self._trap:
            self._stop(worker.process)

    def _client_crash(self) -> None:
        index, worker = self._rng.choice(list(self._sim.workers.items()))
        if worker.process.alive:
            self._say(f"{worker.process.name} is killed")
            self._hit("client crashed")
            worker.process.kill()
            del self._sim.workers[index]
            self._sim.start_worker(index)

    def _client_cut(self) -> None:
        worker, until_ns = self._rng.choice(list(self._sim.workers.values())), self._sim.loop.now_ns + self._for_ns()
        self._say(f"{worker.process.name} is cut off from the store")
        worker.process.troubled_ns = max(worker.process.troubled_ns, until_ns)
        self._sim.network.cut(worker.process.name, STORE, until_ns)
        self._ending(until_ns - self._sim.loop.now_ns, _nothing)


def _nothing() -> None:
    """The end of what ends by itself."""
