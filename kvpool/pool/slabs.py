"""Slabs: bytes granted to a writer in advance, to be cut into blocks from the front.

A slab is no block: it has no key, no tenant, no place in an index, so nothing that looks at blocks can meet it. It is an extent with an
owner, the write lease it was granted under, and its bytes are pinned. What is cut off its front goes to a block or back to the holes;
what is left when the lease ends goes back too.
"""

from collections.abc import Sequence

from kvpool.pool.allocator import Allocator
from kvpool.pool.ledger import Ledger
from kvpool.pool.story import InvariantError


class Slab:
    """`size` bytes at `offset`; both change as its front is cut off. `size` 0: used up."""

    __slots__ = ("offset", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size


class Slabs:
    """The slabs of one arena, by offset."""

    __slots__ = ("_allocator", "_by_offset", "_ledger")

    def __init__(self, allocator: Allocator, ledger: Ledger) -> None:
        self._allocator = allocator
        self._ledger = ledger
        self._by_offset: dict[int, Slab] = {}

    def open(self, offset: int, size: int) -> Slab:
        """A slab over a whole extent, allocated just now and pinned."""
        slab = self._by_offset[offset] = Slab(offset, size)
        return slab

    def cut(self, slab: Slab, sizes: Sequence[int]) -> list[int]:
        """Cut extents of `sizes` off the front, multiples of 64 and together at most what there is; where they lie.

        They stay pinned: the caller's to give to blocks, or to free.
        """
        if not sizes:
            return []
        offset, left = slab.offset, slab.size - sum(sizes)
        if left < 0:
            raise InvariantError(f"{sum(sizes)} bytes cut off a slab of {slab.size}")
        del self._by_offset[offset]
        offsets = self._allocator.divide(offset, [*sizes, left] if left else sizes)
        slab.offset, slab.size = slab.offset + slab.size - left, left
        if left:
            self._by_offset[slab.offset] = slab
        return offsets[: len(sizes)]

    def give_back(self, offset: int) -> bool:
        """Free what is left of the slab at `offset`; False when there is none."""
        slab = self._by_offset.pop(offset, None)
        if slab is None:
            return False
        self._allocator.free(offset)
        self._ledger.free_pinned(slab.size)
        return True

    def extents(self) -> dict[int, int]:
        """Size by offset of all slabs."""
        return {offset: slab.size for offset, slab in self._by_offset.items()}

    def __len__(self) -> int:
        return len(self._by_offset)
