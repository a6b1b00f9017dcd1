"""The blocks that have bytes in the arena, and the steps of their lives.

A block's life is the table `TRANSITIONS`:

* ABSENT → RESERVED, `reserve`. The block has bytes that only its writer knows; readers don't see it. A second writer of the same
  key is told EXISTS: a block is a pure function of its key, so one copy in flight is enough.
* ABSENT → COMMITTED, `carve`: the bytes were written before, to a slab.
* RESERVED → COMMITTED, `commit` by the write lease that reserved it. From now on it is immutable and visible.
* RESERVED → ABSENT, `abandon`: the write lease was released first, or ran out where there is no fence, and the bytes go back at
  once. A writer that comes back from the dead may still scribble over bytes that are somebody else's by then: a reader who checks
  the key and the checksum of its frame takes that for a miss. Who doesn't check them needs the fence.
* RESERVED → DOOMED, `fence`: the write lease ran out and its writer may still be writing (`fences.py`).
* COMMITTED → ABSENT, `evict` (room was needed and the policy named it), `expire` (its ttl ran out) or `discard`; only while
  nobody grips it, and nobody holds it by the board.
* COMMITTED or RESERVED → DOOMED, `doom`: it was to go while leased, or while held by the board. It is unlinked at once, so nobody new
  finds it and its key can be reserved afresh, but its bytes stay until the last lease on it ends and nobody holds it.
* DOOMED → ABSENT, `drain`: that came to pass, or the fence is over.

Every step moves a block along `TRANSITIONS`, moves its bytes between the accounts of the ledger, and takes or gives back its
extent, in one place, so that index, books and allocator can't drift apart. Who may take a step, and when, is decided above
(`state.py`); why a life has these steps stands there too.

A block is *gripped* while a read lease or a hard pin refers to it: then its bytes are pinned, it is neither evicted nor moved.
With a board (`announcer.py`) readers come without asking. So a step that makes a block readable publishes it, one that ends that withdraws
it first, and one that finds it *held* at that moment dooms it instead. A block that moves is not on the board until its bytes are copied.
A *near* copy belongs to a reader close by, not to the pool: it counts against no tenant, until it is adopted.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Final

from kvpool.block import BlockKey
from kvpool.pool.allocator import Allocator, aligned
from kvpool.pool.announcer import Announcer
from kvpool.pool.ledger import Ledger
from kvpool.pool.resident import Resident, State
from kvpool.pool.slabs import Slabs
from kvpool.pool.story import Story
from kvpool.pool.values import NEAR, Books, Location, Move, Reserve

TRANSITIONS: Final[dict[tuple[State, str], State]] = {
    (State.ABSENT, "reserve"): State.RESERVED,
    (State.ABSENT, "carve"): State.COMMITTED,
    (State.RESERVED, "commit"): State.COMMITTED,
    (State.RESERVED, "abandon"): State.ABSENT,
    (State.RESERVED, "fence"): State.DOOMED,
    (State.RESERVED, "doom"): State.DOOMED,
    (State.COMMITTED, "evict"): State.ABSENT,
    (State.COMMITTED, "expire"): State.ABSENT,
    (State.COMMITTED, "discard"): State.ABSENT,
    (State.COMMITTED, "doom"): State.DOOMED,
    (State.DOOMED, "drain"): State.ABSENT,
}
"""(state, event): next state. Whatever isn't here can't happen."""

Watcher = Callable[[Sequence[Resident]], None]
"""Told of blocks that became readable, or that stopped being so, after the step; must be quick and not call back."""


class Blocks:
    """Index, extents and books. `committed` and `reserved` are by key, `extents` has every block by its offset.

    `lingering`: doomed blocks by offset that wait only for who holds them by the board. `moving`: committed blocks whose bytes the shell
    has yet to copy to where they lie now, so that they aren't on the board.
    """

    __slots__ = (
        "_story", "allocator", "board", "committed", "extents", "gripped", "ledger", "lingering", "moving", "near", "reserved", "slabs",
        "tenant_bytes", "watch",
    )  # fmt: skip

    def __init__(self, capacity_bytes: int, story: Story, watch: Watcher | None = None, board: Announcer | None = None) -> None:
        self.allocator = Allocator(capacity_bytes)
        self.ledger = Ledger(self.allocator.capacity_bytes)
        self.slabs = Slabs(self.allocator, self.ledger)
        self.committed: dict[BlockKey, Resident] = {}
        self.reserved: dict[BlockKey, Resident] = {}
        self.extents: dict[int, Resident] = {}
        self.tenant_bytes: dict[str, int] = {}
        self.gripped = 0  # blocks with grips
        self.near: dict[BlockKey, None] = {}  # committed near copies
        self.lingering: dict[int, Resident] = {}
        self.moving: dict[BlockKey, Resident] = {}
        self._story = story
        self.watch = watch
        self.board = board

    def reserve(self, places: Sequence[tuple[Reserve, int]], lease_id: int) -> list[Resident]:
        """ABSENT → RESERVED at offsets that were allocated and are pinned."""
        blocks = [Resident(item, Location(offset, item.length), aligned(item.length), lease_id) for item, offset in places]
        self._step_all(blocks, State.ABSENT, "reserve")
        for block in blocks:
            self.reserved[block.key] = self.extents[block.location.offset] = block
        self._charge(blocks)
        return blocks

    def publish(self, blocks: Sequence[Resident]) -> None:
        """RESERVED → COMMITTED: readers see them from here on."""
        self._step_all(blocks, State.RESERVED, "commit")
        for block in blocks:
            del self.reserved[block.key]
            self.committed[block.key] = block
            if block.near:
                self.near[block.key] = None
        self.ledger.unpin(_nbytes(blocks))
        self._tell(blocks)

    def carve(self, blocks: Sequence[Resident]) -> None:
        """ABSENT → COMMITTED: their bytes were cut off a slab, where they were pinned, and are there already."""
        self._step_all(blocks, State.ABSENT, "carve")
        for block in blocks:
            self.extents[block.location.offset] = self.committed[block.key] = block
            if block.near:
                self.near[block.key] = None
        self.ledger.unpin(self._charge(blocks))
        self._tell(blocks)

    def uncarve(self, offsets: Collection[int]) -> None:
        """These bytes were cut off a slab, and no block is to have them."""
        self.ledger.free_pinned(self.allocator.free_all(offsets))

    def verified(self, block: Resident) -> None:
        """A committed block's bytes have been checked."""
        block.unverified = False
        if self.board is not None:
            self.board.verified(block.key)

    def adopt(self, block: Resident) -> None:
        """A committed near copy is the pool's own from here on."""
        block.near = False
        del self.near[block.key]
        self._charge((block,))

    def abandon(self, block: Resident) -> None:
        """RESERVED → ABSENT: nobody will finish it."""
        self._step(block, "abandon")
        del self.reserved[block.key]
        self.ledger.free_pinned(self._free((block,)))

    def fence(self, block: Resident) -> None:
        """RESERVED → DOOMED, or doomed already: its lease ran out, its writer may still be writing. `drain` it in time."""
        if block.state is State.RESERVED:
            del self.reserved[block.key]
            self._step(block, "fence")

    def drop(self, blocks: Sequence[Resident], event: str) -> Sequence[Resident]:
        """COMMITTED → ABSENT by `event` ("evict", "expire" or "discard"), while nobody grips them.

        Those that somebody holds are DOOMED instead, and their bytes stay; which these are.
        """
        held = self._recalled(blocks)
        kept = [block for block in blocks if block.key in held] if held else ()
        gone = [block for block in blocks if block.key not in held] if held else blocks
        self._step_all(kept, State.COMMITTED, "doom")
        self._step_all(gone, State.COMMITTED, event)
        for block in blocks:
            del self.committed[block.key]
            if block.near:
                del self.near[block.key]
        self.ledger.pin(_nbytes(kept))
        self.lingering.update((block.location.offset, block) for block in kept)
        self.ledger.free_used(self._free(gone))
        if self.watch is not None:
            self.watch(blocks)
        return kept

    def doom(self, block: Resident) -> None:
        """RESERVED or gripped COMMITTED → DOOMED: nobody new finds it, the bytes stay."""
        if block.state is State.RESERVED:
            del self.reserved[block.key]
            self._step(block, "doom")
            return
        self._recalled((block,))  # whoever holds it is looked for when the last grip is gone
        self._step(block, "doom")
        del self.committed[block.key]
        self.near.pop(block.key, None)
        if self.watch is not None:
            self.watch((block,))

    def drain(self, block: Resident) -> None:
        """DOOMED → ABSENT: nobody grips, holds or writes it any more."""
        self._step(block, "drain")
        self.ledger.free_pinned(self._free((block,)))

    def drain_lingering(self, most: int) -> None:
        """Drain the doomed blocks that nobody holds any more, of the `most` that weren't looked at for longest."""
        for offset, block in list(islice(self.lingering.items(), most)):
            del self.lingering[offset]
            if self.held(block):
                self.lingering[offset] = block
            else:
                self.drain(block)

    def held(self, block: Resident) -> bool:
        """Whether somebody who came by the board looks at a block's bytes."""
        return self.board is not None and self.board.held(block.key)

    def grip(self, block: Resident) -> None:
        """One more reference to a committed block."""
        if block.grips == 0:
            self.ledger.pin(block.size)
            self.gripped += 1
        block.grips += 1

    def loosen(self, block: Resident) -> bool:
        """One reference less; True when that was the last one of a committed block, which is then evictable again."""
        block.grips -= 1
        if block.grips:
            return False
        self.gripped -= 1
        if block.state is State.DOOMED:
            if self.held(block):
                self.lingering[block.location.offset] = block
            else:
                self.drain(block)
            return False
        self.ledger.unpin(block.size)
        return True

    def relocate(self, moves: Sequence[Move]) -> bool:
        """Movable blocks lie elsewhere from now on; their bytes are the shell's to copy, in order, and then to be told of by `moved`.

        False, and everything is as it was: somebody holds one of them.
        """
        if self.board is not None and not self._recall([self.extents[move.source] for move in moves]):
            return False
        self.allocator.apply(moves)
        for source, target, _ in moves:
            block = self.extents.pop(source)
            block.location = Location(target, block.location.length)
            self.extents[target] = block
        return True

    def moved(self) -> None:
        """All bytes are where `relocate` said: back on the board with them."""
        moving, self.moving = self.moving, {}
        if self.board is not None:
            self.board.publish(list(moving.values()))

    def movable(self, offset: int) -> bool:
        """Whether the extent at `offset` may be moved: only bytes that nobody may be looking at or writing. A slab may not."""
        block = self.extents.get(offset)
        return block is not None and block.state is State.COMMITTED and not block.grips and not self.held(block)

    def firm(self) -> list[int]:
        """Where the extents lie that can't leave now."""
        blocks = [at for at, block in self.extents.items() if block.state is not State.COMMITTED or block.grips or self.held(block)]
        return blocks + list(self.slabs.extents())

    def mean_gap(self, more: int) -> int:
        """Bytes between two extents on average if nothing stayed but what can't leave now, and `more` extents that are pinned as well.

        0 while somebody holds something: then they would have to be looked for.
        """
        if self.board is not None and self.board.watched():
            return 0
        gaps = len(self.extents) - len(self.committed) + self.gripped + len(self.slabs) + more + 1
        return (self.ledger.free_bytes + self.ledger.used_bytes) // gaps

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

    def _tell(self, blocks: Sequence[Resident]) -> None:
        """They can be read from now on."""
        if self.board is not None:
            self.board.publish(blocks)
        if self.watch is not None:
            self.watch(blocks)

    def _recalled(self, blocks: Sequence[Resident]) -> set[BlockKey]:
        """Take blocks off the board; which of them somebody holds still, by whatever record."""
        board = self.board
        if board is None:
            return set()
        if self.moving:
            for block in blocks:
                self.moving.pop(block.key, None)
        return board.withdraw([block.key for block in blocks])

    def _recall(self, blocks: Sequence[Resident]) -> bool:
        """Take blocks off the board that are to move. When somebody holds one of them, put them back and answer False."""
        assert self.board is not None
        fresh = [block for block in blocks if block.key not in self.moving]  # others have been off since an earlier plan
        if self._recalled(fresh):
            self.board.publish(fresh)
            return False
        self.moving.update((block.key, block) for block in fresh)
        return True

    def _charge(self, blocks: Sequence[Resident]) -> int:
        """Count their bytes against their tenants; how many they are in all."""
        tenant_bytes, total = self.tenant_bytes, 0
        for block in blocks:
            total += block.size
            if not block.near:
                tenant_bytes[block.tenant] = tenant_bytes.get(block.tenant, 0) + block.size
        return total

    def _free(self, blocks: Sequence[Resident]) -> int:
        """Their extents are holes from now on; how many bytes."""
        extents, tenant_bytes, offsets = self.extents, self.tenant_bytes, list[int]()
        for block in blocks:
            offset = block.location.offset
            del extents[offset]
            offsets.append(offset)
            if not block.near:
                left = tenant_bytes[block.tenant] - block.size
                if left:
                    tenant_bytes[block.tenant] = left
                else:
                    del tenant_bytes[block.tenant]
        return self.allocator.free_all(offsets)

    def _step_all(self, blocks: Sequence[Resident], before: State, event: str) -> None:
        """A step that all of them take from the same state."""
        after = TRANSITIONS[before, event]
        for block in blocks:
            if block.state is not before:
                raise self._story.error(f"{event} while {block.state.name}", block.key)
            block.state = after

    def _step(self, block: Resident, event: str) -> None:
        after = TRANSITIONS.get((block.state, event))
        if after is None:
            raise self._story.error(f"{event} while {block.state.name}", block.key)
        block.state = after


def _nbytes(blocks: Sequence[Resident]) -> int:
    return sum([block.size for block in blocks])
