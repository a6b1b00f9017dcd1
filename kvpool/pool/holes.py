"""The free pieces of an arena, by size: bins with the granularity of a small floating point number.

Each hole sits in a bin by size: an exponent and `_MANTISSA_BITS` bits of mantissa, so the sizes in one bin differ by at most 3 %.
A bit per non-empty bin makes "the smallest bin that surely fits" one mask and one bit-length (TLSF: Masmano et al., ECRTS 2004).
`fit` is good-fit: a few holes of the request's own bin are tried (one of equal size is usual where a model's blocks all
have the same length), then the smallest larger bin, the tightest of a few there. Everything but `check` and `largest` is O(1).
"""

from collections.abc import Iterator
from itertools import islice

from kvpool.pool.story import InvariantError

ALIGNMENT = 64
_SHIFT = 6
_MANTISSA_BITS = 5
_PROBES = 8
_LONG_PROBES = 64


def _bin_of(size: int) -> int:
    units = size >> _SHIFT
    exponent = units.bit_length() - 1 - _MANTISSA_BITS
    if exponent < 0:
        return units
    return (exponent << _MANTISSA_BITS) + (units >> exponent)


class Holes:
    """A set of holes. `sizes` maps offset to size; change it only through `add` and `drop`."""

    __slots__ = ("_bins", "_nonempty", "_slot", "sizes")

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._slot: dict[int, int] = {}  # offset: its index in its bin
        self._bins: dict[int, list[int]] = {}  # bin: offsets
        self._nonempty = 0  # bit b: bin b has a hole

    def add(self, offset: int, size: int) -> None:
        """A new hole, which is the first that `fit` looks at in its bin."""
        self.sizes[offset] = size
        number = _bin_of(size)
        offsets = self._bins.get(number)
        if offsets is None:
            offsets = self._bins[number] = []
            self._nonempty |= 1 << number
        self._slot[offset] = len(offsets)
        offsets.append(offset)

    def drop(self, offset: int) -> int:
        """Forget the hole at `offset`; returns its size."""
        size = self.sizes.pop(offset)
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

    def fit(self, size: int) -> int | None:
        """Offset of a good hole of at least `size`, None when there is none.

        A hole of the request's own bin, at most 3 % too large, may be overlooked behind others of its bin.
        """
        number = _bin_of(size)
        candidates = self._nonempty >> number
        if candidates & 1:
            offset = self._tightest(self._bins[number], size)
            if offset is not None:
                return offset
            candidates ^= 1
        if not candidates:
            return None
        number += (candidates & -candidates).bit_length() - 1
        return self._tightest(self._bins[number], size)

    def largest(self, count: int) -> list[int]:
        """Offsets of about the `count` largest holes, largest bin first."""
        return list(islice(self._downwards(), count))

    def overlooked(self, size: int) -> int | None:
        """A hole of at least `size` among the first of the bin of that size, where `fit` doesn't look when there are many."""
        offsets = self._bins.get(_bin_of(size), ())
        return next((offset for offset in offsets[:_LONG_PROBES] if self.sizes[offset] >= size), None)

    def check(self) -> None:
        """Raise `InvariantError` unless bins, slots and the map of bins know every hole exactly once."""
        binned = sorted(offset for offsets in self._bins.values() for offset in offsets)
        if binned != sorted(self.sizes) or len(self._slot) != len(self.sizes):
            raise InvariantError("allocator: bins, slots and holes disagree")
        for number, offsets in self._bins.items():
            wrong = [o for i, o in enumerate(offsets) if self._slot[o] != i or _bin_of(self.sizes[o]) != number]
            if wrong or not offsets or not self._nonempty >> number & 1:
                raise InvariantError(f"allocator: bin {number} is wrong about holes {wrong}")
        if self._nonempty.bit_count() != len(self._bins):
            raise InvariantError("allocator: the map of non-empty bins is wrong")

    def _tightest(self, offsets: list[int], size: int) -> int | None:
        """The smallest hole of at least `size` among the last of a bin."""
        sizes = self.sizes
        if len(offsets) == 1:
            return offsets[0] if sizes[offsets[0]] >= size else None
        best, best_size = None, 0
        for offset in offsets[-_PROBES:]:
            hole = sizes[offset]
            if hole >= size and (best is None or hole < best_size):
                best, best_size = offset, hole
                if hole == size:
                    break
        return best

    def _downwards(self) -> Iterator[int]:
        left = self._nonempty
        while left:
            number = left.bit_length() - 1
            yield from self._bins[number]
            left ^= 1 << number
