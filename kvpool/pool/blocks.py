"""The blocks that have bytes in the arena, and the steps of their lives.

A block's life is the table `TRANSITIONS`:

* ABSENT → RESERVED, `reserve`. The block has bytes that only its writer knows; readers don't see it. A second writer of the same
  key is told EXISTS: a block is a pure function of its key, so one copy in flight is enough.
* RESERVED → COMMITTED, `commit` by the write lease that reserved it. From now on it is immutable and visible.
* RESERVED → ABSENT, `abandon`: the write lease was released or ran out first, and the bytes go back at once. A writer that
  comes back from the dead may still scribble over bytes that are somebody else's by now. That is harmless: every frame carries
  its key and a checksum, every reader checks them, and a failed check is a miss.
* COMMITTED → ABSENT, `evict` (room was needed and the policy named it), `expire` (its ttl ran out) or `discard`; only while
  nobody grips it.
* COMMITTED or RESERVED → DOOMED, `doom`: discarded while leased. It is unlinked at once, so nobody new finds it and its
  key can be reserved afresh, but its bytes stay until the last lease on it ends.
* DOOMED → ABSENT, `drain`: that lease ended.

Every step moves a block along `TRANSITIONS`, moves its bytes between the accounts of the ledger, and takes or gives back its
extent, in one place, so that index, books and allocator can't drift apart. Who may take a step, and when, is decided above
(`state.py`); why a life has these steps stands there too.

A block is *gripped* while a read lease or a hard pin refers to it: then its bytes are pinned, it is neither evicted nor moved.
A *near* copy belongs to a reader close by, not to the pool: it counts against no tenant, until it is adopted.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvpool.block import BlockKey
from kvpool.pool.allocator import Allocator, aligned
from kvpool.pool.ledger import Ledger
from kvpool.pool.resident import Resident, State
from kvpool.pool.story import Story
from kvpool.pool.values import NEAR, Books, Location, Move, Reserve

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

Watcher = Callable[[Resident], None]
"""Told of each block that becomes readable or stops being so, after the step; must be quick and not call back."""


class Blocks:
    """Index, extents and books. `committed` and `reserved` are by key, `extents` has every block by its offset."""

    __slots__ = ("_story", "allocator", "committed", "extents", "ledger", "near", "reserved", "tenant_bytes", "watch")

    def __init__(self, capacity_bytes: int, story: Story, watch: Watcher | None = None) -> None:
        self.allocator = Allocator(capacity_bytes)
        self.ledger = Ledger(self.allocator.capacity_bytes)
        self.committed: dict[BlockKey, Resident] = {}
        self.reserved: dict[BlockKey, Resident] = {}
        self.extents: dict[int, Resident] = {}
        self.tenant_bytes: dict[str, int] = {}
        self.near: dict[BlockKey, None] = {}  # committed near copies
        self._story = story
        self.watch = watch

    def reserve(self, item: Reserve, offset: int, lease_id: int) -> Resident:
        """ABSENT → RESERVED at an allocated `offset`."""
        block = Resident(item, Location(offset, item.length), aligned(item.length), lease_id)
        self._step(block, "reserve")
        self.ledger.reserve(block.size)
        self.reserved[item.key] = self.extents[offset] = block
        if not item.near:
            self._charge(block)
        return block

    def publish(self, block: Resident) -> None:
        """RESERVED → COMMITTED: readers see it from here on."""
        self._step(block, "commit")
        del self.reserved[block.key]
        self.committed[block.key] = block
        if block.near:
            self.near[block.key] = None
        self.ledger.unpin(block.size)
        if self.watch is not None:
            self.watch(block)

    def adopt(self, block: Resident) -> None:
        """A committed near copy is the pool's own from here on."""
        block.near = False
        del self.near[block.key]
        self._charge(block)

    def abandon(self, block: Resident) -> None:
        """RESERVED → ABSENT: nobody will finish it."""
        self._step(block, "abandon")
        del self.reserved[block.key]
        self.ledger.free_pinned(self._free(block))

    def drop(self, block: Resident, event: str) -> None:
        """COMMITTED → ABSENT by `event` ("evict", "expire" or "discard"), while nobody grips it."""
        self._step(block, event)
        del self.committed[block.key]
        self.near.pop(block.key, None)
        self.ledger.free_used(self._free(block))
        if self.watch is not None:
            self.watch(block)

    def doom(self, block: Resident) -> None:
        """RESERVED or COMMITTED → DOOMED: nobody new finds it, the bytes stay."""
        if block.state is State.COMMITTED:
            self.near.pop(block.key, None)
        readable = block.state is State.COMMITTED
        del (self.committed if readable else self.reserved)[block.key]
        self._step(block, "doom")
        if readable and self.watch is not None:
            self.watch(block)

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

    def present(self, keys: Sequence[BlockKey]) -> bytes:
        """One byte a key: 1 when it is committed, `NEAR` when only as a near copy, else 0."""
        present = bytes(map(self.committed.__contains__, keys))
        near = self.near
        return bytes(NEAR if key in near else there for key, there in zip(keys, present, strict=True)) if near else present

    def books(self, *, read_leases: int, write_leases: int) -> Books:
        """Bytes and counts now."""
        ledger = self.ledger
        return Books(
            capacity=ledger.capacity_bytes,
            free=ledger.free_bytes,
            used=ledger.used_bytes,
            pinned=ledger.pinned_bytes,
            blocks=len(self.committed),
            read_leases=read_leases,
            write_leases=write_leases,
        )

    def _charge(self, block: Resident) -> None:
        self.tenant_bytes[block.tenant] = self.tenant_bytes.get(block.tenant, 0) + block.size

    def _free(self, block: Resident) -> int:
        del self.extents[block.location.offset]
        if not block.near:
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
