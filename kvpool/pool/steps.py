"""The parts of one pool, and the steps that its calls have in common: time that passes, lives that begin and end.

Every call first settles what is due (`_advance`): leases, pins and ttls that ran out, fences that are over. A block enters the index by
`_publish` and leaves it by `_evict`, `_expire` or a discard; each of these knows all the places that must hear of it.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvpool.block import BlockKey
from kvpool.policy.eviction import EvictionPolicy
from kvpool.policy.price import Regret, recompute
from kvpool.pool.announcer import Announcer
from kvpool.pool.blocks import Blocks, Watcher
from kvpool.pool.deadlines import NEVER_NS, Deadlines
from kvpool.pool.fences import Fences
from kvpool.pool.keeper import Keeper
from kvpool.pool.leases import Lease, Leases
from kvpool.pool.limits import PoolLimits
from kvpool.pool.pens import Pens
from kvpool.pool.quotas import Quotas
from kvpool.pool.resident import Resident, State
from kvpool.pool.story import Story

_COUNTERS = (
    "hits", "misses", "inserted", "evicted", "expired", "discarded", "refused", "refused_quota", "reclaimed_leases", "moved_bytes",
)  # fmt: skip


class Steps:
    """What `PoolState` is made of. Its public calls are in `writing.py` and `state.py`."""

    def __init__(
        self,
        capacity_bytes: int,
        policy: EvictionPolicy,
        limits: PoolLimits | None = None,
        watch: Watcher | None = None,
        board: Announcer | None = None,
    ) -> None:
        self._limits = limits or PoolLimits()
        self._story = Story(self._limits.max_story_keys)
        self._blocks = Blocks(capacity_bytes, self._story, watch, board)
        self._pens = Pens(policy)
        self._leases = Leases(self._limits)
        self._keeper = Keeper(self._blocks, self._pens, self._limits)
        self._pins = self._keeper.pins
        self._quotas = Quotas(self._blocks.tenant_bytes, self._limits)
        self._expiries: Deadlines[bytes] = Deadlines()
        self._fences = Fences(self._limits.fence_ns)
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._regret = Regret()
        self._guarded = False
        self._now_ns = 0
        self._due_ns = NEVER_NS  # nothing is due before

    @property
    def limits(self) -> PoolLimits:
        """The bounds it was made with."""
        return self._limits

    # Lives

    def _known(self, keys: Iterable[BlockKey]) -> Iterator[Resident]:
        return filter(None, map(self._blocks.committed.get, keys))

    def _unlink(self, block: Resident) -> None:
        """A committed block is about to leave the index: out of the order of eviction, without pins, without a ttl."""
        self._pens.remove(block)
        if block.ttl_ns:
            self._expiries.drop(block.key)
        if block.soft or block.hard:
            self._keeper.forget(block)

    def _drop(self, blocks: Sequence[Resident], event: str) -> Sequence[Resident]:
        """Unlinked blocks that nobody grips leave; those whose bytes stay, because somebody holds them."""
        held = self._blocks.drop(blocks, event)
        if held:
            self._story.record(self._now_ns, "held, so doomed", 0, tuple(block.key for block in held))
        return held

    def _evict(self, blocks: Sequence[Resident]) -> None:
        """Unlinked blocks leave, because room was needed."""
        for block in blocks:
            if not (self._guarded or block.passing):  # else another node or tier has it still
                self._regret.left(block.key, block.size, recompute(block.size, block.depth))
        self._drop(blocks, "evict")

    def _expire(self, block: Resident) -> None:
        self._unlink(block)
        self._drop((block,), "expire")
        self._story.record(self._now_ns, "expired", 0, (block.key,))
        self._counters["expired"] += 1

    def _doom(self, block: Resident) -> None:
        self._blocks.doom(block)
        self._story.record(self._now_ns, "doomed", 0, (block.key,))

    def _repin(self, block: Resident) -> None:
        """Pins of the block came or went."""
        if self._keeper.settle(block, self._now_ns) and block.expires_ns <= self._now_ns:
            self._expire(block)

    # Time

    def _advance(self, now_ns: int) -> int:
        """Settle everything that is due; the time that counts."""
        now_ns = self._now_ns = max(now_ns, self._now_ns)
        if now_ns < self._due_ns:
            return now_ns
        while (lease := self._leases.due(now_ns)) is not None:
            self._counters["reclaimed_leases"] += 1
            self._end(lease, "lease ran out", fenced=self._fences.fence_ns > 0)
        while (due := self._pins.pop_due(now_ns)) is not None:
            self._repin(self._blocks.committed[due[0]])
        while (key := self._expiries.pop_due(now_ns)) is not None:
            block = self._blocks.committed[BlockKey(key)]
            if not block.grips:
                self._expire(block)
        while (offset := self._fences.pop_due(now_ns)) is not None:
            if not self._blocks.slabs.give_back(offset):
                self._blocks.drain(self._blocks.extents[offset])
        self._due_ns = self._first_due_ns()
        return now_ns

    def _first_due_ns(self) -> int:
        leases, pins = self._leases.first_deadline_ns(), self._pins.first_deadline_ns()
        return min(leases, pins, self._expiries.first_ns(), self._fences.first_ns())

    def _deadline(self, lease_ns: int, now_ns: int) -> int:
        deadline_ns = now_ns + min(lease_ns, self._limits.max_lease_ns)
        self._due_ns = min(self._due_ns, deadline_ns)
        return deadline_ns

    # Ends of leases

    def _end(self, lease: Lease, why: str, *, fenced: bool = False) -> None:
        """A lease is over. `fenced`: what its writer didn't finish is fenced off from now on."""
        self._leases.end(lease)
        if lease.writes is not None:
            (self._fence if fenced else self._give_back)(lease)
            self._story.record(self._now_ns, f"{why} before its commit", lease.id, tuple(lease.writes))
            return
        loosen = self._blocks.loosen
        over = [block for block in lease.reads if loosen(block) and block.expires_ns <= self._now_ns]
        for block in over:
            self._expire(block)
        self._story.record(self._now_ns, why, lease.id, [block.key for block in lease.reads])

    def _give_back(self, lease: Lease) -> None:
        for block in lease.held():
            if block.state is State.DOOMED:
                self._blocks.drain(block)
            else:
                self._blocks.abandon(block)
        if lease.slab is not None:
            self._blocks.slabs.give_back(lease.slab.offset)

    def _fence(self, lease: Lease) -> None:
        for block in lease.held():
            self._blocks.fence(block)
            self._fences.add(block.location.offset, self._now_ns)
        if lease.slab is not None:
            self._fences.add(lease.slab.offset, self._now_ns)
