"""How often was a key seen lately: a count-min sketch with 4-bit counters that halve.

Count-min (Cormode and Muthukrishnan, 2005): four rows of counters; a key owns one counter in each row, chosen by hashes
of its bytes, and its count is the lowest of the four, since others can only have added to it. An addition raises only the
counters that are at that lowest value ("minimal increment"), which keeps the errors small. Counters stop at 15. After ten
additions per counter of a row every counter is halved, so the sketch forgets what was popular long ago (TinyLFU: Einziger,
Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", https://arxiv.org/abs/1512.00727).

Two counters share a byte: a sketch of width w takes 2w bytes whatever it is told. Hashes come from xxh3, so that two processes
agree on every estimate.
"""

from typing import Final

import numpy as np
import xxhash

from kvpool.errors import ConfigError

MAX_COUNT: Final = 15
_ROWS = 4
_ADDITIONS_PER_COUNTER = 10
_MAX_WIDTH = 1 << 28


class FrequencySketch:
    """Approximate counts of the recent past, 0..15. `width`: about how many keys to tell apart; rounded up to a power of two.

    An estimate never lies below the true count since the last halving (capped at 15); it lies above it for few keys as long
    as not many more than `width` keys are about.
    """

    __slots__ = ("_additions", "_counters", "_halve_at", "_mask", "width")

    def __init__(self, width: int) -> None:
        if not 1 <= width <= _MAX_WIDTH:
            raise ConfigError(f"a frequency sketch is 1 to {_MAX_WIDTH} wide, got {width}")
        self.width = max(16, 1 << (width - 1).bit_length())
        self._mask = self.width - 1
        self._counters = bytearray(_ROWS * self.width // 2)  # row after row; the low nibble is the even counter
        self._additions = 0
        self._halve_at = _ADDITIONS_PER_COUNTER * self.width

    def add(self, key: bytes) -> None:
        """One more sighting of `key`."""
        counters, slots = self._counters, self._slots(key)
        counts = [counters[slot >> 1] >> ((slot & 1) << 2) & 15 for slot in slots]
        lowest = min(counts)
        if lowest < MAX_COUNT:
            for slot, count in zip(slots, counts, strict=True):
                if count == lowest:
                    counters[slot >> 1] += 1 << ((slot & 1) << 2)
        self._additions += 1
        if self._additions >= self._halve_at:
            self._halve()

    def estimate(self, key: bytes) -> int:
        """About how often `key` was added lately, 0..15."""
        counters = self._counters
        return min(counters[slot >> 1] >> ((slot & 1) << 2) & 15 for slot in self._slots(key))

    def _slots(self, key: bytes) -> tuple[int, int, int, int]:
        digest, mask, width = xxhash.xxh3_128_intdigest(key), self._mask, self.width
        return (
            digest & mask,
            (digest >> 32 & mask) + width,
            (digest >> 64 & mask) + 2 * width,
            (digest >> 96 & mask) + 3 * width,
        )

    def _halve(self) -> None:
        packed = np.frombuffer(self._counters, dtype=np.uint8)
        np.right_shift(packed, 1, out=packed)
        np.bitwise_and(packed, 0x77, out=packed)
        self._additions //= 2
