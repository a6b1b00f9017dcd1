"""Which keys are read so often that one copy is too few. Pure; time is an argument.

Reads are counted by the minute. Most keys are read once or twice, so a sketch sees them first, and only those it has seen a few times are
counted one by one, at most `max_counted` at a time. A key is told once a minute, in the moment its count reaches the threshold.
"""

from kvpool.policy.sketch import FrequencySketch
from kvpool.units import SECOND

WINDOW_NS = 60 * SECOND
_DOOR = 4
_WIDTH = 1 << 14


class HotReads:
    """Counts of this minute."""

    __slots__ = ("_counts", "_max_counted", "_seen", "_since_ns")

    def __init__(self, max_counted: int = 4096) -> None:
        self._max_counted = max_counted
        self._counts: dict[bytes, int] = {}
        self._seen = FrequencySketch(_WIDTH)
        self._since_ns: int | None = None

    def read(self, key: bytes, threshold: int, now_ns: int) -> bool:
        """`key` was read; True when that makes it hot: `threshold` (>= 1) times this minute, which is told once."""
        if self._since_ns is None or now_ns - self._since_ns >= WINDOW_NS:
            self._since_ns = now_ns
            self._counts.clear()
            self._seen = FrequencySketch(_WIDTH)
        count = self._counts.get(key)
        if count is not None:
            self._counts[key] = count + 1
            return count + 1 == threshold
        self._seen.add(key)
        count = self._seen.estimate(key)
        if count < min(_DOOR, threshold) or len(self._counts) >= self._max_counted:
            return False
        self._counts[key] = count
        return count >= threshold
