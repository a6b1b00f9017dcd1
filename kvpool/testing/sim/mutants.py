"""Defects of the pool on purpose: each mutant breaks one promise in the real core or around it, and the simulation must notice.

Most change the core itself, some what stands around it: the node's fence and clock, the copying of moved blocks, what a reader checks.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from kvpool.block import BlockKey
from kvpool.pool import PoolState
from kvpool.pool.allocator import Allocator
from kvpool.pool.blocks import Blocks
from kvpool.pool.fences import Fences
from kvpool.pool.flow import Flush, TierFlow
from kvpool.pool.keeper import Keeper
from kvpool.pool.leases import Leases
from kvpool.pool.pens import Pens
from kvpool.pool.pins import Pins
from kvpool.pool.quotas import Quotas
from kvpool.pool.resident import Resident, State
from kvpool.pool.room import Room
from kvpool.pool.slabs import Slab, Slabs
from kvpool.pool.steps import Steps
from kvpool.pool.writing import Writing
from kvpool.testing.board_twin import BoardTwin
from kvpool.testing.sim import frames, node
from kvpool.testing.sim.below import Below
from kvpool.testing.sim.disk_mutants import DISK_MUTANTS
from kvpool.testing.sim.judge_local import LocalJudge
from kvpool.testing.sim.mutant import Mutant, Patch
from kvpool.wire.fence import NodeIdentity


def _late_commit() -> Sequence[Patch]:
    commit = PoolState.commit

    def late(self: PoolState, lease_id: int, keys: Sequence[BlockKey], now_ns: int, **options: bool) -> tuple[bool, ...]:
        return commit(self, lease_id, keys, 0, **options)  # time doesn't go back, so nothing is settled

    return [(Writing, "commit", late)]


def _leak() -> Sequence[Patch]:
    def abandon(self: Blocks, block: Resident) -> None:
        self._step(block, "abandon")
        del self.reserved[block.key]

    return [(Blocks, "abandon", abandon)]


def _double_free() -> Sequence[Patch]:
    drop = Blocks.drop

    def twice(self: Blocks, blocks: Sequence[Resident], event: str) -> Sequence[Resident]:
        held = drop(self, blocks, event)
        if event == "expire":
            self.allocator.free_all([block.location.offset for block in blocks])
        return held

    return [(Blocks, "drop", twice)]


def _leased_evicted() -> Sequence[Patch]:
    evictable = Room._evictable

    def blind(self: Room) -> Iterator[Resident]:
        for key in list(self._pens.victims()):
            block = self._blocks.committed.get(key)
            if block is not None and block.grips == 1 and not block.hard and key not in self._named:
                self._blocks.loosen(block)
                yield block
        yield from evictable(self)

    return [(Room, "_evictable", blind)]


def _named_evicted() -> Sequence[Patch]:
    start = Room.__init__

    def forget(self: Room, *arguments: Any) -> None:
        start(self, *arguments)
        self._named = {item.key for item in arguments[0]}

    return [(Room, "__init__", forget)]


def _ttl_under_reader() -> Sequence[Patch]:
    advance = PoolState._advance

    def hasty(self: PoolState, now_ns: int) -> int:
        for block in list(self._blocks.committed.values()):
            if block.expires_ns <= now_ns and block.grips and not block.hard:
                self._unlink(block)
                self._doom(block)
        return advance(self, now_ns)

    return [(Steps, "_advance", hasty)]


def _doomed_early() -> Sequence[Patch]:
    doom = Blocks.doom

    def early(self: Blocks, block: Resident) -> None:
        doom(self, block)
        self.ledger.free_pinned(self._free((block,)))

    return [(Blocks, "doom", early), (Blocks, "drain", lambda self, block: self._step(block, "drain"))]


def _counted_twice() -> Sequence[Patch]:
    commit = PoolState.commit

    def twice(self: PoolState, lease_id: int, keys: Sequence[BlockKey], now_ns: int, **options: bool) -> tuple[bool, ...]:
        there = [key in self._blocks.committed for key in keys]
        answer = commit(self, lease_id, keys, now_ns, **options)
        self._counters["inserted"] += sum(done and before for done, before in zip(answer, there, strict=True))
        return answer

    return [(Writing, "commit", twice)]


def _probe_is_a_use() -> Sequence[Patch]:
    lookup = PoolState.lookup

    def touching(self: PoolState, keys: Sequence[BlockKey], now_ns: int) -> bytes:
        answer = lookup(self, keys, now_ns)
        for key in keys:
            if key in self._blocks.committed:
                self._pens.touch(self._blocks.committed[key], now_ns, 0)
        return answer

    return [(PoolState, "lookup", touching)]


def _renewal_shortens() -> Sequence[Patch]:
    return [(Leases, "extend", lambda self, lease_id, deadline_ns: self._deadlines.set(lease_id, deadline_ns))]


def _ids_again() -> Sequence[Patch]:
    end = Leases.end

    def forget(self: Leases, lease: Any) -> None:
        end(self, lease)
        if not self._by_id:
            self._last_id = 0

    return [(Leases, "end", forget)]


def _quota_off_by_one() -> Sequence[Patch]:
    def allow(self: Quotas, tenant: str, size: int) -> bool:
        quota = self.max_bytes.get(tenant)
        return quota is None or self._used.get(tenant, 0) < quota

    return [(Quotas, "allow", allow)]


def _hard_pin_evicted() -> Sequence[Patch]:
    return [(Keeper, "_harden", lambda self, block, hard: False)]


def _pin_for_ever() -> Sequence[Patch]:
    return [(Pins, "pop_due", lambda self, now_ns: None)]


def _soft_pin_first() -> Sequence[Patch]:
    def victims(self: Pens) -> Iterator[BlockKey]:
        yield from self.softly.victims()
        yield from self.policy.victims()

    return [(Pens, "victims", victims)]


def _suspect_kept() -> Sequence[Patch]:
    discard = PoolState.discard

    def keep(self: PoolState, key: BlockKey) -> bool:
        block = self._blocks.committed.get(key)
        return True if block is not None and block.grips else discard(self, key)

    return [(PoolState, "discard", keep)]


def _ranges_unchecked() -> Sequence[Patch]:
    return [(PoolState, "leased_ranges", lambda self, lease_id, ranges, write=None: True)]


def _limits_ignored() -> Sequence[Patch]:
    return [(Leases, "room_for", lambda self, references: True)]


def _no_key_check() -> Sequence[Patch]:
    opens = frames.opens
    return [(frames, "opens", lambda frame, key: opens(frame, BlockKey(frame[8:40])))]


def _no_checksum() -> Sequence[Patch]:
    return [(frames, "opens", lambda frame, key: frame[8:40] == key)]


def _no_fence() -> Sequence[Patch]:
    return [(node, "check", lambda metadata, me, needed: None)]


def _same_incarnation() -> Sequence[Patch]:
    start = node.Node.start

    def again(self: node.Node) -> None:
        start(self)
        self.identity = NodeIdentity("n0", 1)

    return [(node.Node, "start", again)]


def _wall_clock() -> Sequence[Patch]:
    return [(node.Node, "now_ns", lambda self: self.wall_ns())]


def _moved_without_bytes() -> Sequence[Patch]:
    return [(node.Node, "relocate", lambda self, moves: self.pool.moved(moves))]


def _reserved_is_visible() -> Sequence[Patch]:
    enter = Blocks.reserve

    def visible(self: Blocks, *arguments: Any) -> list[Resident]:
        blocks = enter(self, *arguments)
        for block in blocks:
            block.state = State.COMMITTED
            self.committed[block.key] = block
        return blocks

    return [(Blocks, "reserve", visible)]


def _dirty_evicted() -> Sequence[Patch]:
    evictable = Room._evictable

    def blind(self: Room) -> Iterator[Resident]:
        for block in self._blocks.committed.values():
            block.dirty = False
        return evictable(self)

    return [(Room, "_evictable", blind)]


def _refusal_is_success() -> Sequence[Patch]:
    flushed = TierFlow.flushed

    def trusting(self: TierFlow, flush: Flush, stored: Sequence[bool], now_ns: int) -> None:
        flushed(self, flush, [True] * len(stored), now_ns)

    return [(TierFlow, "flushed", trusting)]


def _flush_is_a_use() -> Sequence[Patch]:
    return [(PoolState, "hold", PoolState.acquire)]


def _flush_never_lets_go() -> Sequence[Patch]:
    flushed = TierFlow.flushed

    def forgetful(self: TierFlow, flush: Flush, stored: Sequence[bool], now_ns: int) -> None:
        flushed(self, Flush(0, flush.keys, flush.places), stored, now_ns)

    return [(TierFlow, "flushed", forgetful)]


def _damaged_comes_back() -> Sequence[Patch]:
    return [(Below, "forget", lambda self, key: None)]


def _held_given_away() -> Sequence[Patch]:
    withdraw = BoardTwin.withdraw

    def blind(self: BoardTwin, keys: Sequence[BlockKey]) -> set[BlockKey]:
        withdraw(self, keys)
        return set()

    return [(BoardTwin, "held", lambda self, key: False), (BoardTwin, "withdraw", blind)]


def _not_withdrawn() -> Sequence[Patch]:
    publish = BoardTwin.publish

    def again(self: BoardTwin, blocks: Sequence[Resident]) -> None:
        for block in blocks:
            self.records.pop(block.key, None)
        publish(self, blocks)

    return [
        (BoardTwin, "withdraw", lambda self, keys: set(filter(self.held, keys))),
        (BoardTwin, "publish", again),
        (LocalJudge, "board", _silent),
    ]


def _silent(self: LocalJudge, board: BoardTwin) -> None:
    """Doesn't compare the board with the index, so that only its readers can notice."""


def carved_bytes_lost() -> Sequence[Patch]:
    """Blocks that were cut off a slab are never free again."""
    cut, free = Slabs.cut, Allocator.free_all
    loose: set[int] = set()

    def cutting(self: Slabs, slab: Slab, sizes: Sequence[int]) -> list[int]:
        offsets = cut(self, slab, sizes)
        loose.update(offsets)
        return offsets

    def kept(self: Allocator, offsets: Collection[int]) -> int:
        others = [offset for offset in offsets if offset not in loose]
        loose.difference_update(offsets)
        return free(self, others)

    return [(Slabs, "cut", cutting), (Allocator, "free_all", kept)]


def _no_fence_of_bytes() -> Sequence[Patch]:
    def add(self: Fences, offset: int, now_ns: int) -> None:
        self._queue.append((now_ns, offset))

    return [(Fences, "add", add)]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(name="late commit", what="a commit after its lease's end is accepted", seeds=10, patches=_late_commit),
    Mutant(name="leak", what="an abandoned reservation keeps its bytes", seeds=10, patches=_leak),
    Mutant(name="double free", what="an expired block's bytes are given back twice", seeds=10, patches=_double_free),
    Mutant(name="leased evicted", what="a block with one reader is evicted", seeds=10, patches=_leased_evicted),
    Mutant(name="parent evicted", what="a block is evicted for the sake of its own child", seeds=10, patches=_named_evicted),
    Mutant(name="ttl under reader", what="a ttl ends a leased block", seeds=10, patches=_ttl_under_reader),
    Mutant(name="doomed early", what="a discarded block's bytes are given back under its readers", seeds=40, patches=_doomed_early),
    Mutant(name="counted twice", what="a repeated commit counts again", seeds=30, patches=_counted_twice),
    Mutant(name="probe is a use", what="a lookup changes the order of eviction", seeds=20, patches=_probe_is_a_use),
    Mutant(name="renewal shortens", what="a renewal may bring a deadline forward", seeds=40, patches=_renewal_shortens),
    Mutant(name="ids again", what="lease ids are used again", seeds=10, patches=_ids_again),
    Mutant(name="quota off by one", what="a tenant may exceed its quota by a block", seeds=20, patches=_quota_off_by_one),
    Mutant(name="hard pin evicted", what="a hard pin holds nothing", seeds=20, patches=_hard_pin_evicted),
    Mutant(name="pin for ever", what="a pin's deadline is ignored", seeds=30, patches=_pin_for_ever),
    Mutant(name="soft pin first", what="softly pinned blocks leave first", seeds=40, patches=_soft_pin_first),
    Mutant(name="suspect kept", what="a damaged block that is being read is not dropped", seeds=30, patches=_suspect_kept),
    Mutant(name="ranges unchecked", what="bytes move over the control connection under any lease", seeds=10, patches=_ranges_unchecked),
    Mutant(name="limits ignored", what="the lease table has no bound", seeds=80, patches=_limits_ignored),
    Mutant(name="reserved is visible", what="a block is found before its commit", seeds=10, patches=_reserved_is_visible),
    Mutant(name="no key check", what="a reader takes another block's frame", seeds=100, patches=_no_key_check),
    Mutant(name="no checksum", what="a reader takes a damaged frame", seeds=30, patches=_no_checksum),
    Mutant(name="no fence", what="a node serves calls meant for its last life", seeds=80, patches=_no_fence),
    Mutant(name="same incarnation", what="two lives of a node have one incarnation", seeds=30, patches=_same_incarnation),
    Mutant(name="wall clock", what="leases are timed by a clock that jumps", seeds=10, patches=_wall_clock),
    Mutant(name="moved without bytes", what="a relocated block's bytes stay behind", seeds=60, patches=_moved_without_bytes),
    Mutant(name="dirty evicted", what="a block leaves before it is written down", seeds=30, patches=_dirty_evicted),
    Mutant(name="refusal is success", what="what the tier below refused counts as written", seeds=30, patches=_refusal_is_success),
    Mutant(name="flush is a use", what="writing a block down counts as a use of it", seeds=10, patches=_flush_is_a_use),
    Mutant(name="flush never lets go", what="a flush keeps its lease", seeds=10, patches=_flush_never_lets_go),
    Mutant(name="damaged comes back", what="a damaged block is dropped here, not below", seeds=30, patches=_damaged_comes_back),
    Mutant(name="held given away", what="bytes leave under a process that holds them", seeds=10, patches=_held_given_away),
    Mutant(name="not withdrawn", what="a block that left can still be read by the board", seeds=10, patches=_not_withdrawn),
    Mutant(
        name="carved bytes lost",
        what="what a slab couldn't use is lost to the pool",
        seeds=10,
        patches=carved_bytes_lost,
    ),
    Mutant(name="bytes not fenced", what="the bytes of a lease that ran out go to others at once", seeds=10, patches=_no_fence_of_bytes),
    *DISK_MUTANTS,
)
