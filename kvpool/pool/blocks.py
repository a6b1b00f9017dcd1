"""The blocks that have bytes in the arena, and the steps of their lives.

Every step moves a block along `TRANSITIONS`, moves its bytes between the accounts of the ledger, and takes or gives back its
extent, in one place, so that index, books and allocator can't drift apart. Who may take a step, and when, is decided above
(`state.py`); why a life has these steps stands there too.

A block is *gripped* while a read lease or a hard pin refers to it: then its bytes are pinned, it is neither evicted nor moved.
"""

from collections.abc import Sequence
from typing import Final

from kvpool.block import BlockKey
from kvpool.pool.allocator import Allocator, aligned
from kvpool.pool.ledger import Ledger
from kvpool.pool.resident import Resident, State
from kvpool.pool.story import Story
from kvpool.pool.values import Location, Move, Reserve

TRANSITIONS: Final[dict[tuple[State, str], State]] = {
    (State.ABSENT, "reserve"): State.RESERVED,
    (State.RESERVED, "commit"): State.COMMITTED,
    (State.RESERVED, "abandon"): State.ABSENT,
    (State.RESERVED, "doom"): State.DOOMED,
    (State.COMMITTED, "evict"): State.ABSENT,
    (State.COMMITTED, "expire"): State.ABSENT,
    (State.COMMITTED, "discard"): State.ABSENT,
    (State.COMMITTED, "doom"): State.DOOMED,
    (State.DOOMED, "drain"): State.ABSENT,
}
"""(state, event): next state. Whatever isn't here can't happen."""


class Blocks:
    """Index, extents and books. `committed` and `reserved` are by key, `extents` has every block by its offset."""

    __slots__ = ("_story", "allocator", "committed", "extents", "ledger", "reserved", "tenant_bytes")

    def __init__(self, capacity_bytes: int, story: Story) -> None:
        self.allocator = Allocator(capacity_bytes)
        self.ledger = Ledger(self.allocator.capacity_bytes)
        self.committed: dict[BlockKey, Resident] = {}
        self.reserved: dict[BlockKey, Resident] = {}
        self.extents: dict[int, Resident] = {}
        self.tenant_bytes: dict[str, int] = {}
        self._story = story

    def reserve(self, item: Reserve, offset: int, lease_id: int) -> Resident:
        """ABSENT → RESERVED at an allocated `offset`."""
        block = Resident(item, Location(offset, item.length), aligned(item.length), lease_id)
        self._step(block, "reserve")
        self.ledger.reserve(block.size)
        self.reserved[item.key] = self.extents[offset] = block
        self.tenant_bytes[item.tenant] = self.tenant_bytes.get(item.tenant, 0) + block.size
        return block

    def publish(self, block: Resident) -> None:
        """RESERVED → COMMITTED: readers see it from here on."""
        self._step(block, "commit")
        del self.reserved[block.key]
        self.committed[block.key] = block
        self.ledger.unpin(block.size)

    def abandon(self, block: Resident) -> None:
        """RESERVED → ABSENT: nobody will finish it."""
        self._step(block, "abandon")
        del self.reserved[block.key]
        self.ledger.free_pinned(self._free(block))

    def drop(self, block: Resident, event: str) -> None:
        """COMMITTED → ABSENT by `event` ("evict", "expire" or "discard"), while nobody grips it."""
        self._step(block, event)
        del self.committed[block.key]
        self.ledger.free_used(self._free(block))

    def doom(self, block: Resident) -> None:
        """RESERVED or COMMITTED → DOOMED: nobody new finds it, the bytes stay."""
        del (self.reserved if block.state is State.RESERVED else self.committed)[block.key]
        self._step(block, "doom")

    def drain(self, block: Resident) -> None:
        """DOOMED → ABSENT: the last one who held it is gone."""
        self._step(block, "drain")
        self.ledger.free_pinned(self._free(block))

    def grip(self, block: Resident) -> None:
        """One more reference to a committed block."""
        if block.grips == 0:
            self.ledger.pin(block.size)
        block.grips += 1

    def loosen(self, block: Resident) -> bool:
        """One reference less; True when that was the last one of a committed block, which is then evictable again."""
        block.grips -= 1
        if block.grips:
            return False
        if block.state is State.DOOMED:
            self.drain(block)
            return False
        self.ledger.unpin(block.size)
        return True

    def relocate(self, moves: Sequence[Move]) -> None:
        """Movable blocks lie elsewhere from now on; their bytes are the shell's to copy, in order."""
        self.allocator.apply(moves)
        for source, target, _ in moves:
            block = self.extents.pop(source)
            block.location = Location(target, block.location.length)
            self.extents[target] = block

    def movable(self, offset: int) -> bool:
        """Whether the extent at `offset` may be moved: only bytes that nobody may be looking at or writing."""
        block = self.extents[offset]
        return block.state is State.COMMITTED and not block.grips

    def _free(self, block: Resident) -> int:
        del self.extents[block.location.offset]
        left = self.tenant_bytes[block.tenant] - block.size
        if left:
            self.tenant_bytes[block.tenant] = left
        else:
            del self.tenant_bytes[block.tenant]
        return self.allocator.free(block.location.offset)

    def _step(self, block: Resident, event: str) -> None:
        after = TRANSITIONS.get((block.state, event))
        if after is None:
            raise self._story.error(f"{event} while {block.state.name}", block.key)
        block.state = after
