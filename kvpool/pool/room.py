"""Room for the items of one `reserve` call: where they go, who leaves for them, what moves aside.

All items of a call are placed together where that can be: who has to leave for them in any case leaves first, in one step, and then as many
as fit go to one hole. For each that is left over room is made in this order: a hole that fits; blocks moved together so that the free bytes
become one hole (once enough is free, and as long as that copies little: `Allocator.move_budget`); the next victim of the eviction policy;
blocks moved together when no victim is left. Never taken: what anyone grips, or holds by the board, the blocks and parents named in the
same call, and, while a slower tier is attached, *dirty* blocks: they wait to be written down first, and the caller is told to ask again
(`waiting`). A victim that somebody has begun to hold just now is gone for readers, but its bytes stay (DOOMED): the next one has to leave,
too.

Nothing is evicted for an item larger than free + used, and an item that still doesn't fit after `_PATIENCE` evictions goes on only if
some gap between gripped extents could take it, so a large block can't empty a pool whose leases leave no room for it.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import count, islice
from typing import Final, NamedTuple

from kvpool.block import BlockKey
from kvpool.pool.allocator import aligned
from kvpool.pool.blocks import Blocks
from kvpool.pool.limits import PoolLimits
from kvpool.pool.pens import Pens
from kvpool.pool.resident import Resident, State
from kvpool.pool.story import Story
from kvpool.pool.values import Move, Reserve

_ALL: Final = 1 << 63
_PATIENCE = 16
_DIRTY_SEARCH = 1024  # dirty blocks passed over in one call
_HELD_SEARCH = 4096  # blocks that somebody holds by the board passed over in one search
_QUOTA_SEARCH = 8192  # blocks looked at in one call for those of a tenant at its quota


class LeavingSteps(NamedTuple):
    """How victims leave: each is unlinked at once, and soon after they are evicted together."""

    unlink: Callable[[Resident], None]
    evict: Callable[[Sequence[Resident]], None]


class Room:
    """Use as a context manager around one call."""

    def __init__(self, items: Sequence[Reserve], blocks: Blocks, pens: Pens, limits: PoolLimits, steps: LeavingSteps, story: Story) -> None:
        self._named = {item.key for item in items}
        self._named.update(item.parent for item in items if item.parent is not None)
        self._blocks = blocks
        self._pens = pens
        self._limits = limits
        self._steps = steps
        self._story = story
        self._victims = self._evictable()
        self._ceiling: int | None = None  # no item above it can fit; None: not computed
        self._passed_dirty = 0
        self._taken: list[int] = []
        """Where there is room for blocks that aren't known yet."""
        self.moves: list[Move] = []
        self.evicted: list[BlockKey] = []
        self.waiting = False

    def __enter__(self) -> "Room":
        return self

    def __exit__(self, *_: object) -> None:
        self._victims.close()

    def places(self, lengths: Sequence[int]) -> list[int | None]:
        """Offsets for blocks of these lengths, as many behind each other as fit; None for those without room.

        Their bytes are pinned from then on. Who has to leave for them in any case leaves at once, at most one for each of them.
        """
        ledger, sizes = self._blocks.ledger, [aligned(length) for length in lengths]
        self._taken.clear()  # what was found before is known by now
        total, most = 0, ledger.free_bytes + ledger.used_bytes
        for size in sizes:
            total += size if total + size <= most else 0
        ahead = total > ledger.free_bytes and len(sizes) > 1
        if ahead:
            self._leave(islice(self._victims, len(sizes)), total - ledger.free_bytes)
        offsets = self._runs(sizes) if self._may_know(len(sizes)) else list[int | None]([None] * len(sizes))
        for offset, size in zip(offsets, sizes, strict=True):
            self._take(offset, size)
        for at, size in enumerate(sizes):
            if offsets[at] is None:
                offsets[at] = self._place(lengths[at], size, int(ahead))
                self._take(offsets[at], size)
        return offsets

    def _take(self, offset: int | None, size: int) -> None:
        if offset is not None:
            self._taken.append(offset)
            self._blocks.ledger.reserve(size)

    def _may_know(self, count: int) -> bool:
        """Whether so many blocks more may be known now."""
        return len(self._blocks.extents) + len(self._taken) + count <= self._limits.max_blocks

    def _place(self, length: int, size: int, left: int) -> int | None:
        """An offset for `length` bytes, or None. `left`: how many have left for it already."""
        ledger = self._blocks.ledger
        if size > ledger.free_bytes + ledger.used_bytes:
            fits = size <= ledger.capacity_bytes
            self.waiting = self.waiting or (fits and any(block.dirty for block in self._blocks.committed.values()))
            return None
        for evicted in count(left):
            if self._may_know(1):
                offset = self._fit(length, size, others_may_leave=True)
                if offset is not None:
                    return offset
            if evicted == _PATIENCE and not self._gap_takes(size):
                return None
            if not self._leave(islice(self._victims, 1)):
                break
        offset = None
        if self._may_know(1):
            offset = self._fit(length, size, others_may_leave=False)
        if offset is None:
            self.waiting = self.waiting or self._passed_dirty > 0
        return offset

    def admits(self, count: int) -> int:
        """How many blocks more may be known, of `count`, victims having left if need be."""
        while (left := self._limits.max_blocks - len(self._blocks.extents)) < count:
            if not self._leave(islice(self._victims, count - left)):
                self.waiting = self.waiting or self._passed_dirty > 0
                return max(0, left)
        return count

    def keep_to_quotas(self, items: Sequence[Reserve], quotas: Mapping[str, int]) -> None:
        """Evict blocks of tenants that these items would take over their quota, as far as a bounded search finds them."""
        if not quotas:
            return
        wanted: dict[str, int] = {}
        known = (self._blocks.committed, self._blocks.reserved)
        for item in items:
            if item.tenant in quotas and not item.near and not any(item.key in index for index in known):
                wanted[item.tenant] = wanted.get(item.tenant, 0) + aligned(item.length)
        used = self._blocks.tenant_bytes
        over = {tenant: need for tenant, size in wanted.items() if (need := used.get(tenant, 0) + size - quotas[tenant]) > 0}
        if not over:
            return
        with closing(self._evictable()) as candidates:
            for _, block in zip(range(_QUOTA_SEARCH), candidates, strict=False):
                need = 0 if block.near else over.get(block.tenant, 0)
                if need > 0 and self._leave((block,)) and block.state is State.ABSENT:
                    over[block.tenant] = need - block.size
                    if all(left <= 0 for left in over.values()):
                        return

    def _fit(self, length: int, size: int, *, others_may_leave: bool) -> int | None:
        allocator = self._blocks.allocator
        offset = allocator.allocate(length)
        if offset is not None or allocator.free_bytes < size:
            return offset
        budget_bytes = allocator.move_budget(length, others_may_leave=others_may_leave)
        moves = allocator.plan_moves(length, self._blocks.movable, budget_bytes)
        if moves is None or not self._blocks.relocate(moves):
            return None
        self.moves += moves
        return allocator.allocate(length)

    def _runs(self, sizes: Sequence[int]) -> list[int | None]:
        """Offsets in the first holes that take them all, or halves of them, and so on."""
        offsets = self._blocks.allocator.allocate_run(sizes)
        if offsets is not None:
            return list(offsets)
        if len(sizes) == 1:
            return [None]
        half = len(sizes) // 2
        return self._runs(sizes[:half]) + self._runs(sizes[half:])

    def _leave(self, victims: Iterable[Resident], nbytes: int = _ALL) -> bool:
        """Evict blocks until they had `nbytes`; False when there were none. The bytes of one that is held stay for now."""
        leaving: list[Resident] = []
        for block in victims:
            self._steps.unlink(block)
            leaving.append(block)
            nbytes -= block.size
            if nbytes <= 0:
                break
        self.evicted += [block.key for block in leaving]
        self._steps.evict(leaving)
        return bool(leaving)

    def _gap_takes(self, size: int) -> bool:
        """Whether some gap between extents that can't leave would take `size` bytes, if all else left.

        The largest is looked for only where the mean one wouldn't, and once a call, in which it can but shrink.
        """
        if size <= self._blocks.mean_gap(len(self._taken)):
            return True
        if self._ceiling is None:
            self._ceiling = self._blocks.allocator.largest_between(self._blocks.firm() + self._taken)
        return size <= self._ceiling

    def _evictable(self) -> Generator[Resident, None, None]:
        """Blocks that may go, in the order of eviction. Does nothing until first asked."""
        board, passed_held = self._blocks.board, 0
        watched = board is not None and board.watched()  # who begins to hold one from now on is met when it leaves
        with closing(self._pens.victims()) as candidates:
            for key in candidates:
                block = self._blocks.committed.get(key)
                if block is None:
                    raise self._story.error("offered for eviction, but not committed", key)
                if key in self._named:
                    continue
                if block.dirty:  # gripped or not: the grip may be that of the flush
                    self._passed_dirty += 1
                    if self._passed_dirty > _DIRTY_SEARCH:
                        return
                elif block.grips:
                    continue
                elif not watched or not self._blocks.held(block):
                    yield block
                else:
                    passed_held += 1
                    if passed_held > _HELD_SEARCH:
                        return
