"""When a process that died is started again: exponential backoff, forgiven after a stretch of healthy life. Pure."""

from kvpool.units import MS, SECOND

FIRST_DELAY_NS = 500 * MS
LONGEST_DELAY_NS = 8 * SECOND
HEALTHY_LIFE_NS = 30 * SECOND


class Backoff:
    """The delays of one process: 0.5 s, 1 s, 2 s ... 8 s; a life of 30 s or more counts as the first death again."""

    def __init__(self) -> None:
        self._streak = 0

    @property
    def streak(self) -> int:
        """Deaths in a row, each after a short life."""
        return self._streak

    def died(self, lived_ns: int) -> int:
        """Record a death after `lived_ns` nanoseconds; how long to wait before the next start, in nanoseconds."""
        self._streak = 1 if lived_ns >= HEALTHY_LIFE_NS else self._streak + 1
        return min(LONGEST_DELAY_NS, FIRST_DELAY_NS << min(self._streak - 1, 16))
