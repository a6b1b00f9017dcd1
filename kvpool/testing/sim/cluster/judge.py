"""Who sees everything: what was written and where it is, and the promises of a cluster. The first broken one ends the world.

Theory. The judge knows every payload that some writer made, and looks into every pool. It says nothing to anybody, so it can't help. What
it asks of each run:

* a read delivers exactly the bytes of a write of that block; a store that claims blocks has made each of them visible somewhere;
* no call is answered by another life than the one it was meant for;
* what becomes visible anywhere is a whole frame of its key, unless its bytes were flipped, or scribbled on by a zombie, on that very node;
* every core's books balance;
* a balancer pushes only what its node holds in its own right, and lets go only on old news, and of what every target holds, on active
  nodes, or has lost by something else than a balancer; so no last copy goes because of one;
* a view's config never goes back; nobody is in quarantine but by more than half of those who may report; nobody who kept beating at a
  store that answered is dropped from a view;
* in a world where nodes only come and go in good order, or where one fault happens at a time to two copies: what once was on all its
  targets is never on no node, and in the former is always delivered.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey, check_frame
from kvpool.cluster.member import Identity
from kvpool.errors import FrameError
from kvpool.policy.placement import NodeState, write_targets
from kvpool.pool.resident import Resident, State
from kvpool.request.pool import Outcome
from kvpool.testing.sim.cluster.store import Reading, SimMembership
from kvpool.testing.sim.cluster.vloop import Process, VirtualLoop
from kvpool.testing.sim.cluster.wire import Call
from kvpool.testing.sim.marks import Coverage
from kvpool.transport import Run
from kvpool.units import MS, SECOND

if TYPE_CHECKING:
    from kvpool.testing.sim.cluster.node import Life

_SPREAD = 0x9E3779B97F4A7C15
_EXCUSE_NS = 10 * SECOND
"""For so long the loss of a copy may be unknown to a balancer that counted on it: one slice of its round at most."""


class Judge:
    """The judge of one world. `names`: blocks as transcripts call them; `audit_every`: calls between two audits of a core; `lossy`:
    heartbeats get lost."""

    def __init__(self, loop: VirtualLoop, names: dict[BlockKey, str], coverage: Coverage, audit_every: int, *, lossy: bool) -> None:
        self.lives: list[Life] = []
        self.memberships: list[SimMembership] = []
        self.delivered = 0
        self.steady: dict[BlockKey, None] = {}
        """Blocks that once were on all their targets, in worlds where that must last."""
        self.granted: Callable[[Process], None] = lambda process: None
        """Told of each process that was granted room to write."""
        self.names = names
        self._loop = loop
        self._coverage = coverage
        self._audit_every = audit_every
        self._lossy = lossy
        self._calls = 0
        self._salts = 0
        self._written: set[tuple[BlockKey, int]] = set()
        self._visible: set[BlockKey] = set()
        self._lost_ns: dict[BlockKey, int] = {}
        self._missed: dict[tuple[str, BlockKey], tuple[str, int]] = {}
        self._versions: dict[SimMembership, int] = {}
        self._known: dict[SimMembership, set[Identity]] = {}

    def fail(self, what: str) -> None:
        """A promise is broken."""
        self._loop.trouble = self._loop.trouble or what

    # Bytes

    def fill(self, key: BlockKey, payload: npt.NDArray[np.uint8]) -> None:
        """Write what no other write of any block looks like."""
        self._salts += 1
        self._written.add((key, self._salts))
        words = payload.view(np.uint64)
        words[:] = _word(key, self._salts)
        words[0] = self._salts

    def read(self, key: BlockKey, payload: npt.NDArray[np.uint8]) -> None:
        """A reader was given this."""
        words = payload.view(np.uint64)
        salt = int(words[0])
        if (key, salt) not in self._written or not (words[1:] == _word(key, salt)).all():
            self.fail(f"a reader got bytes for {self.name(key)} that nobody wrote")
        self.delivered += 1

    def stored(self, keys: Sequence[BlockKey], held: int) -> None:
        """A store claimed that `held` of these blocks are in the pool."""
        seen = sum(key in self._visible for key in keys)
        if held > seen:
            self.fail(f"a store claims {held} blocks, and only {seen} of them were ever visible")

    def writes(self, life: "Life", lease_id: int, runs: Sequence[Run]) -> None:
        """Bytes are about to be written into an arena."""
        life.pool.tick(self._loop.now_ns)
        for run in runs:
            units = range(run.offset // 64, -(-(run.offset + run.length) // 64))
            if life.pool.leased_ranges(lease_id, [(run.offset, run.length)], write=True):
                life.tainted.difference_update(units)
            else:
                self._coverage.hit("zombie wrote after its lease")
                life.tainted.update(units)

    # Pools

    def changed(self, life: "Life", blocks: Sequence[Resident]) -> None:
        """Blocks became readable or stopped being so."""
        for block in blocks:
            if block.state is State.COMMITTED:
                self._readable(life, block)
            elif not life.letting_go:
                self._lost_ns[block.key] = self._loop.now_ns

    def _readable(self, life: "Life", block: Resident) -> None:
        self._visible.add(block.key)
        offset, length = block.location
        try:
            check_frame(life.arena.view(offset, length), block.key)
        except FrameError as error:
            if life.tainted.isdisjoint(range(offset // 64, -(-(offset + length) // 64))):
                self.fail(f"{life.process.name} published {self.name(block.key)}, which is damaged: {error}")

    def died(self, life: "Life") -> None:
        """A life is over, and its memory with it."""
        self._lost_ns.update(dict.fromkeys(life.pool.committed_keys(), self._loop.now_ns))
        self.lives.remove(life)
        self._keep_steady()

    def heard(self, life: "Life", call: Call) -> None:
        """A call got past a node's fence."""
        if call.meant is not None and call.meant != life.handler.identity:
            self.fail(f"{life.process.name} takes a call that was meant for another life")

    def answered(self, life: "Life", call: Call, outcome: object) -> None:
        """A call was answered."""
        if call.what == "reserve" and isinstance(outcome, tuple):
            if outcome[0]:
                self.granted(call.caller)
            for block, (said, _) in zip(call.arguments[2], outcome[1], strict=True):
                if said is Outcome.EXISTS:  # there, or being written by somebody: a store counts on it
                    self._visible.add(block.key)
        if call.what == "acquire" and isinstance(outcome, tuple):
            self._compare(life, call, outcome[1])
        self._calls += 1
        if self._calls % self._audit_every == 0:
            life.pool.check()
            self._keep_steady()

    def _compare(self, life: "Life", call: Call, places: Sequence[object]) -> None:
        """Notice a reader that finds on one node what it missed on another a moment ago."""
        now_ns = self._loop.now_ns
        for key, place in zip(call.arguments[2], places, strict=True):
            asked = call.caller.name, key
            if place is None:
                self._missed[asked] = life.node_id, now_ns
            elif asked in self._missed:
                node_id, at_ns = self._missed.pop(asked)
                if node_id != life.node_id and now_ns - at_ns < SECOND:
                    self._coverage.hit("read went to a second node")

    def holders(self, key: BlockKey) -> list["Life"]:
        """Who holds a block in its own right."""
        return [life for life in self.lives if (link := life.pool.link(key)) is not None and not link[2]]

    def _keep_steady(self) -> None:
        for key in self.steady:
            if not self.holders(key):
                self.fail(f"{self.name(key)} was on all its targets, and now nobody has it")

    # Balancers

    def observe(self, life: "Life") -> None:
        """Look over a life's shoulder when it pushes and lets go."""
        balancer, pusher = life.side.balancer, life.side.pusher
        push, let_go = pusher.push, balancer._let_go

        async def pushing(ref: object, keys: Sequence[BlockKey], *, near: bool = False) -> set[BlockKey]:
            for key in keys:
                link = life.pool.link(key)
                if link is not None and link[2] and not near:
                    self.fail(f"{life.process.name} pushes {self.name(key)} as its own, of which it has a near copy only")
            sent = await push(ref, keys, near=near)  # type: ignore[arg-type]
            if sent:
                self._coverage.hit("hot extent spread" if near else "block pushed")
            return sent

        async def letting(keys: Sequence[BlockKey]) -> None:
            for key in keys:
                self._may_go(life, key)
            life.letting_go = True
            work = let_go(keys)
            try:
                await work
            finally:
                life.letting_go = False

        pusher.push = pushing  # type: ignore[method-assign]
        balancer._let_go = letting  # type: ignore[method-assign]

    def _may_go(self, life: "Life", key: BlockKey) -> None:
        balancer = life.side.balancer
        assert balancer._now is not None
        if not balancer._now.sure:
            self.fail(f"{life.process.name} lets go of {self.name(key)} while others may not know what it knows")
        situation = balancer._now.situation
        head = life.side.balancer._inventory.head(key, situation.config.extent_tokens)
        states = {node.id: node.state for node in situation.placed}
        targets = write_targets(head, situation.placed, situation.config.copies) if head is not None else ()
        name = life.process.name
        if not targets or life.node_id in targets or any(states[target] is not NodeState.ACTIVE for target in targets):
            self.fail(f"{name} lets go of {self.name(key)}, which belongs to {[target[:4] for target in targets]}")
        holders = {other.node_id for other in self.holders(key)}
        if not self._excused(key) and not set(targets) <= holders:
            self.fail(f"{name} lets go of {self.name(key)}, and a target doesn't have it")
        self._coverage.hit("block let go")

    def may_stop(self, life: "Life") -> None:
        """A drain has ended: with this node nothing must go that is in order on it, unless another copy went a moment ago."""
        config = life.side.links.config
        for key in life.pool.committed_keys():
            link = life.pool.link(key)
            placed = link is not None and not link[2] and life.side.balancer._inventory.head(key, config.extent_tokens) is not None
            if placed and self.holders(key) == [life] and not self._excused(key):
                self.fail(f"{life.process.name} is drained, and nobody else has {self.name(key)}")

    def _excused(self, key: BlockKey) -> bool:
        """Whether a copy was lost, by something else than a balancer, so lately that a node may still count on it."""
        lost_ns = self._lost_ns.get(key)
        return lost_ns is not None and self._loop.now_ns - lost_ns < _EXCUSE_NS

    # Views

    def looked(self, membership: SimMembership, reading: Reading | None) -> None:
        """A process has looked at the store."""
        view = membership.view
        if view.config.version < self._versions.get(membership, 0):
            self.fail(f"the config went back to version {view.config.version}")
        self._versions[membership] = view.config.version
        if reading is None:
            return
        entries = list(view._known.values())
        for subject in view.quarantined:
            others = [entry for entry in entries if entry.member.identity != subject and entry.member.role != "router"]
            against = sum(subject in entry.reports for entry in others)
            self._coverage.hit("node in quarantine")
            if 2 * against <= len(others):
                self.fail(f"{subject[1][:4]} is in quarantine by {against} of {len(others)}")
        known = {member.identity for member in view.members}
        for identity in self._known.get(membership, ()):
            if identity not in known and not self._lossy and self._beats_on(identity):
                self.fail(f"{identity[1][:4]} beats all the time, and {membership.process.name} forgot it")
        self._known[membership] = known

    def _beats_on(self, identity: Identity) -> bool:
        """Whether a member has had nothing to do with any fault lately, and has not left."""
        for membership in self.memberships:
            for registration in membership.registrations:
                if registration.member.identity == identity:
                    calm_ns = self._loop.now_ns - membership.process.troubled_ns
                    left = registration.stopped or registration.superseded
                    return not left and membership.process.running and calm_ns > 3 * membership.lease_ms * MS
        return False

    def name(self, key: BlockKey) -> str:
        """As transcripts call it."""
        return self.names.get(key) or key.hex()[:8]


def _word(key: BlockKey, salt: int) -> np.uint64:
    return np.uint64((salt * _SPREAD & 0xFFFF_FFFF_FFFF_FFFF) ^ int.from_bytes(key[:8], "little"))
