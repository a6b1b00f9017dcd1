"""The simulated node: the real pool core, an arena of real bytes, two clocks, and lives that end.

Theory. Calls arrive one at a time. Each says which life of the node it means and is refused by another (`kvpool.wire.fence`). The pool's
time is the monotonic clock; the wall clock may jump and only names incarnations. A crash takes the arena and the pool with it: the next
life starts empty under a new incarnation, while old mappings of the old arena stay writable for those who have them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from kvpool.block import BlockKey
from kvpool.errors import ConfigError, UnavailableError
from kvpool.policy.eviction import make_policy
from kvpool.pool import Acquired, Granted, Move, PinOutcome, PoolState, Reserve, Reserved, SlabGrant
from kvpool.testing.board_twin import BoardTwin
from kvpool.testing.sim import frames
from kvpool.testing.sim.below import NODE, Below, Kept
from kvpool.testing.sim.disk import Crash
from kvpool.testing.sim.ground import Ground
from kvpool.testing.sim.judge import Judge, Violation
from kvpool.testing.sim.judge_local import LocalJudge
from kvpool.testing.sim.loop import Loop
from kvpool.testing.sim.marks import Coverage
from kvpool.testing.sim.world import World, stream
from kvpool.tier.contract import Tier
from kvpool.tier.ssd.tier import SsdTier
from kvpool.units import US
from kvpool.wire.fence import NodeIdentity, check

WALL_START_NS = 1_700_000_000_000_000_000
SESSION = (-3, None)
"""Who a process of the same host is to the judge."""
REFUSED = "refused"
"""The answer of a node that isn't meant."""


T = TypeVar("T")


class Note(Protocol):
    """Writes one line of a transcript: who did what, with what outcome."""

    def __call__(self, who: str, what: str, arguments: tuple[Any, ...], outcome: Any) -> None:
        """Write it down."""
        ...


class Arena:
    """The bytes of one life."""

    __slots__ = ("view",)

    def __init__(self, capacity_bytes: int) -> None:
        self.view = memoryview(bytearray(capacity_bytes))


class Node:
    """One node through all its lives. `answer` sends an answer back: (client, epoch, call id, incarnation, answer)."""

    def __init__(
        self,
        loop: Loop,
        world: World,
        judge: Judge,
        coverage: Coverage,
        answer: Callable[[int, int, int, int, Any], None],
        note: Note | None,
    ) -> None:
        self.loop = loop
        self.world = world
        self.judge = judge
        self.coverage = coverage
        self.up = False
        self.digest = 0
        self.local = LocalJudge(judge)
        self.wall_offset_ns = 0
        self.pool: PoolState
        self.board: BoardTwin | None = None
        self.arena: Arena
        self.identity = NodeIdentity("n0", 0)
        self._answer = answer
        self.note = note
        self._probes = 0
        self.tick_ns = world.tick_ns
        self.below: Below | None = None
        self.ground = Ground(world, coverage)
        self._kept = Kept({}, ())
        self._recorded = self._last = 0
        self.methods: dict[str, Callable[..., Any]] = {
            "lookup": self.lookup,
            "reserve": self.reserve,
            "commit": self.commit,
            "acquire": self.acquire,
            "renew": self.renew,
            "release": self.release,
            "pin": self.pin,
            "unpin": self.unpin,
            "quota": self.quota,
            "write": self.write,
            "read": self.read,
        }
        self.start()
        loop.after(self.tick_ns, self.tick)

    # Lives

    def now_ns(self) -> int:
        """The monotonic clock: what leases are measured with."""
        return self.loop.now_ns

    def wall_ns(self) -> int:
        """The wall clock: it may jump."""
        return WALL_START_NS + self.loop.now_ns + self.wall_offset_ns

    def start(self) -> None:
        """A new life."""
        world = self.world
        before = self._last if world.below.kind != "ssd" else self._recorded
        self.identity = NodeIdentity("n0", max(self.wall_ns() // US, 0 if world.below.kind == "ssd" else before + 1))
        tier: Tier | None = None
        failures = self.ground.disk.read_failures
        if world.below.kind != "none":
            self.up = True
            try:
                tier = self.die_or(lambda: self.ground.open(self))
            except ConfigError:
                self.crash()
                self.loop.after(world.faults.node_down_ns, self.revive)
            if tier is None:
                return
        sound = not self.ground.disk.lied and failures == self.ground.disk.read_failures
        if isinstance(tier, SsdTier):
            if sound and tier.incarnation <= before:
                raise Violation(f"incarnation {tier.incarnation} after {before}")
            if not sound or not tier.books().counters["write_errors"]:
                self._recorded = tier.incarnation if sound else 0
            self.identity = NodeIdentity("n0", max(tier.incarnation, self._last + 1))  # one that isn't on the disk may come again
        self._last = self.identity.incarnation
        self._live(tier, sound=sound)

    def _live(self, tier: Tier | None, *, sound: bool) -> None:
        """The new life begins."""
        world = self.world
        self.board = BoardTwin() if world.local.count else None
        self.pool = PoolState(world.capacity_bytes, make_policy(world.policy), world.limits, board=self.board)
        self.arena = Arena(world.capacity_bytes)
        self.up = True
        self.judge.restarted()
        self.below = None
        self.judge.may_leave = lambda key: True
        if self.note is not None:
            self.note("node", "start", (), self.identity.incarnation)
        if tier is not None:
            self.below = Below(self, world.below, stream(world.seed, f"below {self.loop.now_ns}"), tier)
            self.judge.may_leave = self.below.may_leave
            self.below.recovered(self._kept, sound=sound)
            if not self.loop.now_ns:
                self.below.load()

    def crash(self, *, power: bool = False) -> None:
        """The process is gone, or the whole machine is without power."""
        self.up = False
        if self.below is not None:
            self._kept = self.below.kept()
            self.below = None
        self.ground.fall(power=power)
        if self.note is not None:
            self.note("node", "power loss" if power else "crash", (), "")

    def die_or(self, call: Callable[[], T]) -> T | None:
        """The answer of a call into the tier below; None when the process dies in its middle: it comes back a while later."""
        try:
            return call()
        except Crash:
            self.coverage.hit("died inside the tier below")
            self.crash(power=self.ground.by_power())
            self.loop.after(self.world.faults.node_down_ns, self.revive)
            return None

    def revive(self) -> None:
        """Start a new life, unless there is one."""
        if not self.up:
            self.start()

    def _lives(self) -> bool:
        return self.up

    def settle(self) -> int:
        """Bring pool and judge to now; what the time is."""
        self.judge.before(self.loop.now_ns)
        self.pool.tick(self.now_ns())
        return self.loop.now_ns

    # Calls

    def receive(
        self, client: int, epoch: int, call: int, meant: tuple[tuple[str, str], ...] | None, method: str, arguments: tuple[Any, ...]
    ) -> None:
        """A call arrives. A dead node is silent."""
        if not self.up:
            return
        answer: Any
        if not self._is_meant(meant, method):
            self.coverage.hit("call answered by a stranger refused")
            answer = REFUSED
        elif method == "describe":
            answer = self.identity, self.arena
        else:
            now_ns, judge = self.loop.now_ns, self.judge
            judge.before(now_ns)
            judge.caller = (client, meant)
            answer = self.methods[method](*arguments)
            if not self._lives():
                return  # it died in the middle
            self._done(now_ns)
            self.digest = (self.digest * 1_000_003 + now_ns + call) & 0xFFFF_FFFF_FFFF_FFFF
        if self.note is not None:
            self.note(f"c{client}", method, arguments, answer)
        self._answer(client, epoch, call, self.identity.incarnation, answer)

    def _is_meant(self, meant: tuple[tuple[str, str], ...] | None, method: str) -> bool:
        try:
            check(meant, self.identity, needed=method != "describe")
        except UnavailableError:
            return False
        return True

    def lookup(self, keys: Sequence[BlockKey]) -> bytes:
        """A probe."""
        self._probes += 1
        before = None
        if self._probes % 4 == 1:
            self.settle()
            before = self.judge.order_of(self.pool)
        answer = self.pool.lookup(keys, self.now_ns())
        self.judge.looked_up(keys, answer)
        if before is not None:
            self.judge.same_order(self.pool, before)
        return answer

    def reserve(self, owner: str, lease_ns: int, items: Sequence[Reserve]) -> Reserved:
        """Room to write."""
        answer = self.room_for(owner, lease_ns, items, self.now_ns())
        self.digest += sum(getattr(grant, "offset", 1) for grant in answer.grants)
        if answer.waiting and self.below is not None:
            self.coverage.hit("room had to wait for a flush")
            self.below.press()
        return answer

    def room_for(self, owner: str, lease_ns: int, items: Sequence[Reserve], now_ns: int) -> Reserved:
        """The same for the node itself; blocks that had to move are copied before anybody hears of it."""
        answer = self.pool.reserve(items, owner=owner, lease_ns=lease_ns, now_ns=now_ns)
        self.relocate(answer.moves)
        self.judge.reserved(self.pool, items, lease_ns, answer, self.loop.now_ns)
        return answer

    def finish(self, lease_id: int, keys: Sequence[BlockKey], now_ns: int) -> None:
        """Publish what was fetched from below, and let go of the rest."""
        self.judge.caller = NODE
        done = self.pool.commit(lease_id, keys, now_ns, clean=True, passing=True)
        self.judge.committed(lease_id, keys, done, self.loop.now_ns)
        self.judge.released(lease_id, self.pool.release(lease_id, now_ns), self.loop.now_ns)

    def relocate(self, moves: Sequence[Move]) -> None:
        """Copy blocks that were given another place, in order."""
        view = self.arena.view
        for source, target, size in moves:
            view[target : target + size] = view[source : source + size]
        self.pool.moved(moves)

    def commit(self, lease_id: int, keys: Sequence[BlockKey]) -> tuple[bool, ...]:
        """Publish."""
        before = [self.pool.locate(key) for key in keys]
        answer = self.pool.commit(lease_id, keys, self.now_ns())
        self.judge.committed(lease_id, keys, answer, self.loop.now_ns)
        self.digest += sum(answer)
        if self.below is not None:
            fresh = [key for key, done, there in zip(keys, answer, before, strict=True) if done and there is None]
            self.below.committed(fresh, sum(at.length for at in map(self.pool.locate, fresh) if at is not None))
        return answer

    def acquire(self, owner: str, lease_ns: int, keys: Sequence[BlockKey]) -> Acquired:
        """Lease what is there."""
        answer = self.pool.acquire(keys, owner=owner, lease_ns=lease_ns, now_ns=self.now_ns())
        self.judge.acquired(keys, lease_ns, answer, self.loop.now_ns)
        self.digest += sum(at.offset for at in answer.found if at is not None)
        if self.below is not None:
            self.below.used([key for key, at in zip(keys, answer.found, strict=True) if at is not None], self.now_ns())
            self.below.missed([key for key, at in zip(keys, answer.found, strict=True) if at is None])
        return answer

    def renew(self, lease_id: int, lease_ns: int) -> bool:
        """Hold on."""
        answer = self.pool.renew(lease_id, lease_ns, self.now_ns())
        self.judge.renewed(lease_id, lease_ns, answer, self.loop.now_ns)
        return answer

    def release(self, lease_id: int, suspects: Sequence[BlockKey]) -> bool:
        """Look at what a reader complains of while its lease still holds it, then let go."""
        now_ns = self.now_ns()
        for key in suspects:
            self.examine(key)
        answer = self.pool.release(lease_id, now_ns)
        self.judge.released(lease_id, answer, self.loop.now_ns)
        return answer

    def examine(self, key: BlockKey) -> None:
        """Drop the block of `key` if its frame is damaged."""
        at = self.pool.locate(key)
        if at is None:
            return
        good = frames.opens(bytes(self.arena.view[at.offset : at.offset + at.length]), key)
        if good:
            self.coverage.hit("reader saw a suspect that was none")
        else:
            self.drop(key)
            self.coverage.hit("damaged block dropped on suspicion")
        self.judge.suspected(key, good)
        if not good and self.below is not None and self.below.tier.find([key])[0] is not None:
            raise Violation(f"{self.judge.name(key)} is damaged, was complained about, and may come back from below")

    def drop(self, key: BlockKey) -> None:
        """Unlink a block, here and below."""
        self.judge.discarded(key, self.pool.discard(key))
        if self.below is not None:
            self.below.forget(key)

    def pin(self, owner: str, duration_ns: int, hard: bool, keys: Sequence[BlockKey]) -> tuple[PinOutcome, ...]:
        """Keep blocks."""
        now_ns = self.now_ns()
        answer = self.pool.pin(keys, owner=owner, hard=hard, duration_ns=duration_ns, now_ns=now_ns)
        self.judge.pinned(keys, owner, hard, self.loop.now_ns + duration_ns, answer, self.loop.now_ns)
        return answer

    def unpin(self, owner: str, keys: Sequence[BlockKey]) -> int:
        """Keep them no longer."""
        answer = self.pool.unpin(keys, owner=owner, now_ns=self.now_ns())
        self.judge.unpinned(keys, owner, answer, self.loop.now_ns)
        return answer

    def quota(self, tenant: str, max_bytes: int) -> None:
        """Limit a tenant; negative lifts the limit."""
        self.pool.tick(self.now_ns())
        self.pool.set_quota(tenant, None if max_bytes < 0 else max_bytes)
        self.judge.truth.quotas.pop(tenant, None)
        if max_bytes >= 0:
            self.judge.truth.quotas[tenant] = max_bytes

    def write(self, lease_id: int, offset: int, data: bytes) -> bool:
        """Bytes over the control connection, for a client that maps nothing."""
        self.pool.tick(self.now_ns())
        allowed = self.pool.leased_ranges(lease_id, [(offset, len(data))], write=True)
        self.judge.covered(lease_id, offset, len(data), True, allowed)
        if allowed:
            self.arena.view[offset : offset + len(data)] = data
        return allowed

    def read(self, lease_id: int, offset: int, length: int) -> bytes:
        """The same for readers; empty when the lease doesn't cover it."""
        self.pool.tick(self.now_ns())
        allowed = self.pool.leased_ranges(lease_id, [(offset, length)], write=False)
        self.judge.covered(lease_id, offset, length, False, allowed)
        return bytes(self.arena.view[offset : offset + length]) if allowed else b""

    # Processes of the same host

    def hold(self, key: BlockKey) -> int:
        """A process holds a block that is on the board; nobody asks the pool."""
        assert self.board is not None
        self.judge.truth.hold(key)
        return self.board.hold(key)

    def let_go(self, number: int, key: BlockKey) -> None:
        """It looks no more, and the node comes to see that."""
        assert self.board is not None
        self.judge.before(self.loop.now_ns)
        self.board.release(number)
        if key not in self.board.records:
            self.coverage.hit("block left while it was held")
        self.judge.truth.unhold(key)
        self._done(self.settle())

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """What processes read."""
        now_ns = self.settle()
        self.local.touched(keys)
        self.pool.touch(keys, self.now_ns())
        self._done(now_ns)

    def slab(self, owner: str, lease_ns: int, nbytes: int) -> SlabGrant | None:
        """Bytes in advance."""
        now_ns = self.settle()
        self.judge.caller = SESSION
        grant = self.pool.grant_slab(nbytes, owner=owner, lease_ns=lease_ns, now_ns=self.now_ns())
        if grant is not None:
            self.relocate(grant.moves)
        self.local.slab(self.pool, nbytes, lease_ns, grant, now_ns)
        if self.note is not None:
            self.note(owner, "slab", (nbytes,), "none" if grant is None else f"lease {grant.lease_id}: {grant.offset}+{grant.nbytes}")
        self._done(now_ns)
        return grant

    def carve(self, lease_id: int, items: Sequence[Reserve]) -> None:
        """Blocks out of them."""
        now_ns = self.settle()
        self.judge.caller = SESSION
        grants = self.pool.carve(lease_id, items, self.now_ns())
        self.local.carved(self.pool, lease_id, items, grants, now_ns)
        if self.note is not None:
            self.note("local", "carve", (lease_id, items), grants)
        fresh = [item for item, grant in zip(items, grants, strict=True) if isinstance(grant, Granted)]
        if self.below is not None and fresh:
            self.below.committed([item.key for item in fresh], sum(item.length for item in fresh))
        if self.up:
            self._done(now_ns)

    def let_slab_go(self, lease_id: int) -> None:
        """The rest goes back."""
        self.judge.caller = SESSION
        now_ns = self.settle()
        answer = self.pool.release(lease_id, self.now_ns())
        self.judge.released(lease_id, answer, now_ns)
        if self.note is not None:
            self.note("local", "release", (lease_id,), answer)
        self._done(now_ns)

    def _done(self, now_ns: int) -> None:
        """A step without a call is over."""
        if self.board is not None:
            self.local.board(self.board)
        self.judge.after(self.pool, now_ns)

    def tick(self) -> None:
        """Now and then, end what has run out."""
        self.loop.after(self.tick_ns, self.tick)
        if not self.up:
            self.loop.stale()
            return
        self._done(self.settle())
