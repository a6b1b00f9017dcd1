"""Room for the items of one `reserve` call: where they go, who leaves for them, what moves aside.

Room is made in this order: a hole that fits; blocks moved together so that the free bytes become one hole (once enough is free, and as
long as that copies little: `Allocator.move_budget`); the next victim of the eviction policy; blocks moved together when no victim is
left. Never taken: what anyone grips, or holds by the board, the blocks and parents named in the same call, and, while a slower tier is
attached, *dirty* blocks: they wait to be written down first, and the caller is told to ask again (`waiting`). A victim that somebody
has begun to hold just now is gone for readers, but its bytes stay (DOOMED): the next one has to leave, too.

Nothing is evicted for an item larger than free + used, and an item that still doesn't fit after `_PATIENCE` evictions goes on only if
some gap between gripped extents could take it, so a large block can't empty a pool whose leases leave no room for it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from itertools import count

from kvpool.block import BlockKey
from kvpool.pool.allocator import aligned
from kvpool.pool.blocks import Blocks
from kvpool.pool.limits import PoolLimits
from kvpool.pool.pens import Pens
from kvpool.pool.resident import Resident
from kvpool.pool.story import Story
from kvpool.pool.values import Move, Reserve

_PATIENCE = 16
_DIRTY_SEARCH = 1024  # dirty blocks passed over in one call
_HELD_SEARCH = 4096  # blocks that somebody holds by the board passed over in one search
_QUOTA_SEARCH = 8192  # blocks looked at in one call for those of a tenant at its quota


class Room:
    """Use as a context manager around one call. `evict` unlinks a victim and gives its bytes back; False: somebody holds them still."""

    def __init__(
        self, items: Sequence[Reserve], blocks: Blocks, pens: Pens, limits: PoolLimits, evict: Callable[[Resident], bool], story: Story
    ) -> None:
        self._named = {item.key for item in items}
        self._named.update(item.parent for item in items if item.parent is not None)
        self._blocks = blocks
        self._pens = pens
        self._limits = limits
        self._evict = evict
        self._story = story
        self._victims = self._evictable()
        self._ceiling: int | None = None  # no item above it can fit; None: not computed
        self._passed_dirty = 0
        self.moves: list[Move] = []
        self.evicted: list[BlockKey] = []
        self.waiting = False

    def __enter__(self) -> "Room":
        return self

    def __exit__(self, *_: object) -> None:
        self._victims.close()

    def place(self, length: int) -> int | None:
        """An offset for `length` bytes, or None."""
        size, ledger = aligned(length), self._blocks.ledger
        if size > ledger.free_bytes + ledger.used_bytes:
            fits = size <= ledger.capacity_bytes
            self.waiting = self.waiting or (fits and any(block.dirty for block in self._blocks.committed.values()))
            return None
        for evicted in count():
            if len(self._blocks.extents) < self._limits.max_blocks:
                offset = self._fit(length, size, others_may_leave=True)
                if offset is not None:
                    return offset
            if evicted == _PATIENCE and size > self._largest_gap():
                return None
            victim = next(self._victims, None)
            if victim is None:
                break
            self._leave(victim)
        offset = None
        if len(self._blocks.extents) < self._limits.max_blocks:
            offset = self._fit(length, size, others_may_leave=False)
        if offset is None:
            self.waiting = self.waiting or self._passed_dirty > 0
        return offset

    def admits(self) -> bool:
        """Whether one block more may be known, victims having left if need be."""
        while len(self._blocks.extents) >= self._limits.max_blocks:
            victim = next(self._victims, None)
            if victim is None:
                self.waiting = self.waiting or self._passed_dirty > 0
                return False
            self._leave(victim)
        return True

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
                if need > 0 and self._leave(block):
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

    def _leave(self, block: Resident) -> bool:
        """Evict a block; False when its bytes stay for now."""
        self.evicted.append(block.key)
        return self._evict(block)

    def _largest_gap(self) -> int:
        """Bytes between gripped extents at most, if all else left. It can only shrink within a call, so once a call is enough."""
        if self._ceiling is None:
            self._ceiling = self._blocks.allocator.largest_between(self._blocks.gripped())
        return self._ceiling

    def _evictable(self) -> Generator[Resident, None, None]:
        """Blocks that may go, in the order of eviction. Does nothing until first asked."""
        board, passed_held = self._blocks.board, 0
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
                elif board is None or not board.held(key):
                    yield block
                else:
                    passed_held += 1
                    if passed_held > _HELD_SEARCH:
                        return
