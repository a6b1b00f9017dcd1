"""Offsets in the arena: variable lengths, size bins, boundary coalescing, relocation.

The allocator knows numbers, not memory. The arena is tiled by *pieces*: extents, which are handed out, and holes, never two of
them adjacent. One dict has a tag for each piece: its size and the size of the piece before it (Knuth's boundary tags), so
a freed extent finds both neighbours in O(1) and merges with those that are holes, and the planner can walk both ways. Holes are
also kept by size (`holes.py`), where a good fit is found in O(1). All lengths are multiples of `ALIGNMENT`, so that every
frame starts on a cache line.

When nothing fits although enough bytes are free, `plan_moves` says which extents to copy where (`relocate.py`). Whoever owns the
bytes books the plan by `apply`, copies them in order, and allocates again. How much to copy is `move_budget`: nothing until a fiftieth of
the arena is free beyond what is asked for, then four times what is asked for. Blocks that leave in order of age leave neighbours
free, and nothing need be copied at all; without that slack, moving would mix the ages, which costs more than it saves.
"""

from collections.abc import Callable, Collection, Sequence

from kvpool.errors import ConfigError
from kvpool.pool.holes import ALIGNMENT as ALIGNMENT
from kvpool.pool.holes import Holes
from kvpool.pool.relocate import BEFORE_MASK, SIZE_SHIFT, Planner
from kvpool.pool.story import InvariantError
from kvpool.pool.values import Move

_SLACK_PARTS = 50
_MOVE_FACTOR = 4


def aligned(length: int) -> int:
    """`length` bytes rounded up to what the allocator takes for them."""
    return (length + ALIGNMENT - 1) & -ALIGNMENT


class Allocator:
    """Hands out non-overlapping extents of `[0, capacity_bytes)`.

    `capacity_bytes` is rounded down to a multiple of `ALIGNMENT`; less than one unit, or 2**48 and more, is a `ConfigError`.
    """

    __slots__ = ("_holes", "_planner", "_tags", "capacity_bytes", "free_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        capacity_bytes &= -ALIGNMENT
        if capacity_bytes <= 0:
            raise ConfigError(f"a pool needs at least {ALIGNMENT} bytes of capacity")
        if capacity_bytes > BEFORE_MASK:
            raise ConfigError(f"a pool has at most {BEFORE_MASK} bytes of capacity, got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._tags: dict[int, int] = {0: capacity_bytes << SIZE_SHIFT}  # offset of a piece: its tag
        self._holes = Holes()
        self._holes.add(0, capacity_bytes)
        self._planner = Planner(self._tags, self._holes, capacity_bytes)

    def allocate(self, length: int) -> int | None:
        """Offset of a new extent of at least `length` > 0 bytes, or None when no hole is large enough.

        A hole of the request's own bin, at most 3 % too large, may be overlooked behind others of its bin.
        """
        if length <= 0:
            raise ConfigError(f"a length must be positive, got {length}")
        size = aligned(length)
        offset = self._holes.fit(size)
        if offset is not None:
            self._take(offset, size)
        return offset

    def allocate_run(self, sizes: Sequence[int]) -> list[int] | None:
        """Offsets of new extents, one behind the other, of these `sizes` (multiples of `ALIGNMENT`); None when no hole takes them all."""
        total = sum(sizes)
        offset = self._holes.fit(total)
        if offset is None:
            return None
        self._take(offset, total)
        return self._cut(offset, sizes)

    def free(self, offset: int) -> int:
        """Take an extent back; returns its size. Raises `InvariantError` when nothing is allocated at `offset`."""
        return self.free_all((offset,))

    def free_all(self, offsets: Collection[int]) -> int:
        """Take extents back; returns their size. Raises `InvariantError` where nothing is allocated. Neighbours become one hole at once."""
        tags, holes = self._tags, self._holes.sizes
        total = start = before = 0
        end = -1
        for offset in sorted(offsets):
            if 0 < end < offset:
                self._open(start, end, before)  # before its tag is looked at: it may say another one now
            tag = tags.get(offset)
            if tag is None or offset in holes or offset < end:
                raise InvariantError(f"free of offset {offset}, where nothing is allocated")
            if offset == end:
                del tags[offset]
            else:
                start, before = offset, tag & BEFORE_MASK
            end = offset + (tag >> SIZE_SHIFT)
            total += tag >> SIZE_SHIFT
        if end > 0:
            self._open(start, end, before)
        self.free_bytes += total
        return total

    def divide(self, offset: int, sizes: Sequence[int]) -> list[int]:
        """Make the extent at `offset` several, of `sizes` that are multiples of `ALIGNMENT` and make up the whole; their offsets.

        Raises `InvariantError` when no such extent is allocated there.
        """
        if offset in self._holes.sizes or min(sizes) <= 0 or any(size % ALIGNMENT for size in sizes) or sum(sizes) != self.size_of(offset):
            raise InvariantError(f"parts of {sizes} of the extent at offset {offset}, which has {self.size_of(offset)}")
        return self._cut(offset, sizes)

    def size_of(self, offset: int) -> int | None:
        """Size of the extent allocated at exactly `offset`, None when there is none."""
        tag = self._tags.get(offset)
        return None if tag is None or offset in self._holes.sizes else tag >> SIZE_SHIFT

    def extents(self) -> list[tuple[int, int]]:
        """All allocated (offset, size), in order of offset."""
        return sorted((offset, tag >> SIZE_SHIFT) for offset, tag in self._tags.items() if offset not in self._holes.sizes)

    def largest_between(self, offsets: Sequence[int]) -> int:
        """The largest hole there would be if only the extents at `offsets` stayed."""
        largest = position = 0
        for offset in sorted(offsets):
            largest = max(largest, offset - position)
            position = offset + (self._tags[offset] >> SIZE_SHIFT)
        return max(largest, self.capacity_bytes - position)

    def plan_moves(self, length: int, movable: Callable[[int], bool], budget_bytes: int) -> list[Move] | None:
        """Which extents to move so that `allocate(length)` succeeds, after it has answered None; None when no way was found.

        `movable(offset)` says whether the extent at an offset may move; it is asked about few. All sizes together are at most
        `budget_bytes`. The moves are to be carried out in order: a target may overlap the move's own source, and what earlier moves left,
        but no bytes that are still somebody's. Once the plan is applied, `allocate(length)` succeeds. An empty plan says that it
        does already. Plans change nothing.
        """
        size = aligned(length)
        if size > self.free_bytes:
            return None
        overlooked = self._holes.overlooked(size)
        if overlooked is not None or self._holes.fit(size) is not None:
            if overlooked is not None:
                self._holes.add(overlooked, self._holes.drop(overlooked))  # to where `fit` looks first
            return []
        return self._planner.plan(size, movable, budget_bytes)

    def move_budget(self, length: int, *, others_may_leave: bool) -> int:
        """Bytes worth copying to place `length` now: none while little is free beyond it, if the next to leave may make it fit."""
        size = aligned(length)
        if others_may_leave and self.free_bytes - size < self.capacity_bytes // _SLACK_PARTS:
            return 0
        return _MOVE_FACTOR * size

    def apply(self, moves: Sequence[Move]) -> None:
        """Rebook the extents of a whole plan. Raises `InvariantError` at a move that doesn't fit what is there."""
        sizes = self._holes.sizes
        for move in moves:
            source, target, size = move
            room = sizes.get(target, 0)
            slides = 0 < room < size and target + room == source
            if self.size_of(source) != size or not (slides or room >= size):
                raise InvariantError(f"{move}: an extent of {self.size_of(source)}, a hole of {room} bytes")
            if slides:
                self.free(source)
                self._take(target, size)
            else:
                self._take(target, size)  # first: its hole may touch the source, and start elsewhere when that is free
                self.free(source)

    @property
    def holes(self) -> int:
        """How many separate holes the free bytes are in."""
        return len(self._holes.sizes)

    def check(self) -> None:
        """Raise `InvariantError` unless extents and holes tile the arena exactly and the bins know every hole."""
        holes = self._holes
        position = before = 0
        after_hole = False
        for offset, tag in sorted(self._tags.items()):
            size, hole = tag >> SIZE_SHIFT, offset in holes.sizes
            wrong = hole and (after_hole or holes.sizes[offset] != size)
            if offset != position or size <= 0 or size % ALIGNMENT or tag & BEFORE_MASK != before or wrong:
                raise InvariantError(f"allocator: piece [{offset}, +{size}, hole={hole}] after position {position}")
            position, before, after_hole = offset + size, size, hole
        if position != self.capacity_bytes:
            raise InvariantError(f"allocator: pieces end at {position}, the arena at {self.capacity_bytes}")
        if sum(holes.sizes.values()) != self.free_bytes:
            raise InvariantError(f"allocator: holes hold {sum(holes.sizes.values())} bytes, counted {self.free_bytes}")
        if not holes.sizes.keys() <= self._tags.keys():
            raise InvariantError("allocator: a hole that is no piece")
        holes.check()

    def _take(self, offset: int, size: int) -> None:
        """Make the first `size` bytes of the hole at `offset` an extent."""
        hole = self._holes.drop(offset)
        self.free_bytes -= size
        if hole > size:
            rest = offset + size  # one object for all who will keep it
            self._tags[offset] = size << SIZE_SHIFT | self._tags[offset] & BEFORE_MASK
            self._write(rest, hole - size, size)
            self._holes.add(rest, hole - size)

    def _cut(self, offset: int, sizes: Sequence[int]) -> list[int]:
        """Make the extent at `offset` several, of `sizes`; where they lie."""
        tags, offsets, before = self._tags, list[int](), self._tags[offset] & BEFORE_MASK
        for size in sizes:
            tags[offset] = size << SIZE_SHIFT | before
            offsets.append(offset)
            offset += size
            before = size
        self._tell(offset, before)
        return offsets

    def _open(self, start: int, end: int, before: int) -> None:
        """Make what isn't allocated any more one hole with its neighbours that are holes; `before`: size of the piece before."""
        tags, holes = self._tags, self._holes
        if end in holes.sizes:
            del tags[end]
            end += holes.drop(end)
        if start - before in holes.sizes and before:
            del tags[start]
            start -= before
            holes.drop(start)
            before = tags[start] & BEFORE_MASK
        self._write(start, end - start, before)
        holes.add(start, end - start)

    def _write(self, offset: int, size: int, before: int) -> None:
        """Tag a piece, and tell the one after it."""
        self._tags[offset] = size << SIZE_SHIFT | before
        self._tell(offset + size, size)

    def _tell(self, offset: int, before: int) -> None:
        """The piece at `offset`, if any, comes after one of so many bytes."""
        if offset != self.capacity_bytes:
            self._tags[offset] = self._tags[offset] >> SIZE_SHIFT << SIZE_SHIFT | before
