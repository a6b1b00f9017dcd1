"""Offsets in the arena: variable lengths, size bins, boundary coalescing.

The allocator knows numbers, not memory. Free space is a set of *holes*, never two of them adjacent. Two dicts name each hole by
its start and by its end, so a freed extent finds both neighbours in O(1) and merges with them. Each hole also sits in a
bin by size; bins are a small floating point: an exponent and `_MANTISSA_BITS` bits of mantissa, so the sizes in one bin differ by
at most 3 %. A bit per non-empty bin makes "the smallest bin that surely fits" one mask and one bit-length.

Placement is good-fit: a few holes of the request's own bin are tried (one of equal size is usual where a model's blocks all
have the same length), then the smallest larger bin, the tightest of a few there. The rest of the hole stays a hole. All
lengths are multiples of `ALIGNMENT`, so that every frame starts on a cache line.
"""

from collections.abc import Sequence

from kvpool.errors import ConfigError
from kvpool.pool.story import InvariantError

ALIGNMENT = 64
_SHIFT = 6
_MANTISSA_BITS = 5
_PROBES = 8


def aligned(length: int) -> int:
    """`length` bytes rounded up to what the allocator takes for them."""
    return (length + ALIGNMENT - 1) & -ALIGNMENT


def _bin_of(size: int) -> int:
    units = size >> _SHIFT
    exponent = units.bit_length() - 1 - _MANTISSA_BITS
    if exponent < 0:
        return units
    return (exponent << _MANTISSA_BITS) + (units >> exponent)


class Allocator:
    """Hands out non-overlapping extents of `[0, capacity_bytes)`.

    `capacity_bytes` is rounded down to a multiple of `ALIGNMENT`; less than one unit is a `ConfigError`.
    """

    __slots__ = ("_bins", "_by_end", "_holes", "_nonempty", "_slot", "_taken", "capacity_bytes", "free_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        capacity_bytes &= -ALIGNMENT
        if capacity_bytes <= 0:
            raise ConfigError(f"a pool needs at least {ALIGNMENT} bytes of capacity")
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._taken: dict[int, int] = {}  # offset: size
        self._holes: dict[int, int] = {}  # offset: size
        self._by_end: dict[int, int] = {}  # end of a hole: its offset
        self._bins: dict[int, list[int]] = {}  # bin: offsets
        self._slot: dict[int, int] = {}  # offset of a hole: its index in its bin
        self._nonempty = 0  # bit b: bin b has a hole
        self._add(0, capacity_bytes)

    def allocate(self, length: int) -> int | None:
        """Offset of a new extent of at least `length` > 0 bytes, or None when no hole is large enough.

        A hole of the request's own bin, at most 3 % too large, may be overlooked behind others of its bin.
        """
        if length <= 0:
            raise ConfigError(f"a length must be positive, got {length}")
        size = aligned(length)
        offset = self._fit(size)
        if offset is None:
            return None
        hole = self._drop(offset)
        if hole > size:
            self._add(offset + size, hole - size)
        self._taken[offset] = size
        self.free_bytes -= size
        return offset

    def free(self, offset: int) -> int:
        """Take an extent back; returns its size. Raises `InvariantError` when nothing is allocated at `offset`."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise InvariantError(f"free of offset {offset}, where nothing is allocated")
        self.free_bytes += size
        start, end = offset, offset + size
        if end in self._holes:
            end += self._drop(end)
        before = self._by_end.get(start)
        if before is not None:
            self._drop(before)
            start = before
        self._add(start, end - start)
        return size

    def size_of(self, offset: int) -> int | None:
        """Size of the extent allocated at exactly `offset`, None when there is none."""
        return self._taken.get(offset)

    def extents(self) -> list[tuple[int, int]]:
        """All allocated (offset, size), in order of offset."""
        return sorted(self._taken.items())

    def largest_between(self, offsets: Sequence[int]) -> int:
        """The largest hole there would be if only the extents at `offsets` stayed."""
        largest = position = 0
        for offset in sorted(offsets):
            largest = max(largest, offset - position)
            position = offset + self._taken[offset]
        return max(largest, self.capacity_bytes - position)

    @property
    def holes(self) -> int:
        """How many separate holes the free bytes are in."""
        return len(self._holes)

    def check(self) -> None:
        """Raise `InvariantError` unless extents and holes tile the arena exactly and the bins know every hole."""
        position, after_hole = 0, False
        pieces = [(o, s, False) for o, s in self._taken.items()] + [(o, s, True) for o, s in self._holes.items()]
        for offset, size, hole in sorted(pieces):
            if offset != position or size <= 0 or size % ALIGNMENT or (hole and after_hole):
                raise InvariantError(f"allocator: piece [{offset}, +{size}, hole={hole}] after position {position}")
            position, after_hole = offset + size, hole
        if position != self.capacity_bytes:
            raise InvariantError(f"allocator: pieces end at {position}, the arena at {self.capacity_bytes}")
        if sum(self._holes.values()) != self.free_bytes:
            raise InvariantError(f"allocator: holes hold {sum(self._holes.values())} bytes, counted {self.free_bytes}")
        binned = sorted(offset for offsets in self._bins.values() for offset in offsets)
        if binned != sorted(self._holes) or {o + s: o for o, s in self._holes.items()} != self._by_end:
            raise InvariantError("allocator: bins, ends and holes disagree")
        for number, offsets in self._bins.items():
            wrong = [o for i, o in enumerate(offsets) if self._slot[o] != i or _bin_of(self._holes[o]) != number]
            if wrong or not offsets or not self._nonempty >> number & 1:
                raise InvariantError(f"allocator: bin {number} is wrong about holes {wrong}")
        if self._nonempty.bit_count() != len(self._bins):
            raise InvariantError("allocator: the map of non-empty bins is wrong")

    def _fit(self, size: int) -> int | None:
        """Offset of a good hole of at least `size`."""
        holes = self._holes
        number = _bin_of(size)
        best, best_size = None, 0
        for offset in self._bins.get(number, ())[-_PROBES:]:
            hole = holes[offset]
            if hole >= size and (best is None or hole < best_size):
                best, best_size = offset, hole
                if hole == size:
                    break
        if best is not None:
            return best
        larger = self._nonempty >> (number + 1)
        if not larger:
            return None
        number += (larger & -larger).bit_length()
        return min(self._bins[number][-_PROBES:], key=lambda offset: (holes[offset], offset))

    def _add(self, offset: int, size: int) -> None:
        self._holes[offset] = size
        self._by_end[offset + size] = offset
        number = _bin_of(size)
        offsets = self._bins.get(number)
        if offsets is None:
            offsets = self._bins[number] = []
            self._nonempty |= 1 << number
        self._slot[offset] = len(offsets)
        offsets.append(offset)

    def _drop(self, offset: int) -> int:
        """Forget the hole at `offset`; returns its size."""
        size = self._holes.pop(offset)
        del self._by_end[offset + size]
        number = _bin_of(size)
        offsets = self._bins[number]
        slot, last = self._slot.pop(offset), offsets.pop()
        if last != offset:
            offsets[slot] = last
            self._slot[last] = slot
        elif not offsets:
            del self._bins[number]
            self._nonempty ^= 1 << number
        return size
